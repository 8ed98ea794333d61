"""``mpistrat checkpoint``: every command with its text, its JSON and its exit status, on files of three formats."""

import json
import os
import re
import subprocess
import sys
import zipfile

import h5py
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from mpistrat.cli import commands
from mpistrat.training import load_arrays, save
from mpistrat.training.checkpoint.write import write

VALUES = {
    "model/w": np.linspace(-1.0, 2.0, 6).reshape(2, 3),
    "model/half": np.arange(4).astype(ml_dtypes.bfloat16),
    "empty": np.zeros((0, 3), "f4"),
    "flags": np.array([True, False]),
    "small": np.array([-3, 7], "i1"),
    "spin": np.array([3 + 4j, np.nan], "c8"),
    "steps": np.array(2**62 + 1),
}


def run(*arguments, status=0):
    result = CliRunner().invoke(commands, ["checkpoint", *map(str, arguments)])
    assert result.exit_code == status, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


def found(*arguments, status=0):
    return json.loads(run(*arguments, "--json", status=status), parse_constant=pytest.fail)


@pytest.fixture
def file(tmp_path):
    save(VALUES, tmp_path / "a.h5")
    return tmp_path / "a.h5"


@pytest.fixture(params=["a.h5", "a.npz", "a.safetensors"])
def each(request, file):
    """The same arrays in each format."""
    if request.param == "a.safetensors":
        pytest.importorskip("safetensors")
    path = file.with_name(request.param)
    if path != file:
        run("convert", file, path)
    return path


def test_ls_of_a_folder(tmp_path):
    for number, size in ((1, 3), (9, 4), (10, 5)):
        write({"x": np.zeros(size)}, tmp_path / f"ckpt-{number}")
        os.utime(tmp_path / f"ckpt-{number}", (1000 + number, 1000 + number))
    (tmp_path / "notes.txt").write_text("not of arrays")
    (tmp_path / ".ckpt-11.tmp").write_bytes(b"\x89HDF")
    files = found("ls", tmp_path)["files"]
    assert [(os.path.basename(line["path"]), line["number"], line["arrays"]) for line in files] == [
        ("ckpt-1", 1, 1),
        ("ckpt-10", 10, 1),
        ("ckpt-9", 9, 1),
    ]
    assert [line["number"] for line in files if line["latest"]] == [10]
    assert files[1]["bytes"] == (tmp_path / "ckpt-10").stat().st_size
    assert files[1]["time"] == 1010
    lines = run("ls", tmp_path).splitlines()
    assert lines[0].split() == ["saved", "number", "arrays", "size", "format", "file"]
    assert lines[2].startswith("*  1970-")
    assert lines[2].endswith(str(tmp_path / "ckpt-10"))


def test_ls_takes_the_latest_of_the_list(tmp_path):
    for number in (1, 2):
        write({"x": np.zeros(3)}, tmp_path / f"ckpt-{number}")
    names = {"all_model_checkpoint_paths": ["ckpt-2", "ckpt-1"], "all_model_checkpoint_timestamps": [1, 2]}
    (tmp_path / "checkpoint").write_text(json.dumps({**names, "last_preserved_timestamp": 0}))
    assert [line["number"] for line in found("ls", tmp_path)["files"] if line["latest"]] == [1]
    (tmp_path / "checkpoint").write_text("[")
    assert "it is not a list of checkpoints" in run("ls", tmp_path, status=1)


def test_ls_of_files_and_damage(file):
    file.with_name("cut.h5").write_bytes(file.read_bytes()[:200])
    report = found("ls", file.parent, status=1)
    assert [os.path.basename(line["path"]) for line in report["files"]] == ["a.h5"]
    (problem,) = report["problems"]
    assert "cut.h5" in problem
    assert "problem: " in run("ls", file, file.parent / "none.h5", status=1)


def test_show(each):
    report = found("show", each)
    arrays = {line["name"]: line for line in report["arrays"]}
    assert {**arrays}.keys() == VALUES.keys()
    for name, value in VALUES.items():
        line = arrays[name]
        assert (line["dtype"], line["shape"]) == (value.dtype.name, [*value.shape])
        assert line["nbytes"] == value.nbytes
        assert bool(line["checksum"]) == (report["format"] != "safetensors")
    assert f"{report['format']}, 7 arrays" in run("show", each)
    numbers = found("show", each, "model/w")["statistics"]
    assert numbers["elements"] == 6
    value = VALUES["model/w"]
    for name in ("min", "max", "mean", "std"):
        assert numbers[name] == pytest.approx(getattr(value, name)())
    numbers = found("show", each, "spin")["statistics"]
    assert (numbers["nan"], numbers["max"]) == (1, 5)
    assert found("show", each, "empty")["statistics"]["max"] is None
    assert found("show", each, "model/half")["statistics"]["mean"] == 1.5
    assert "has no array 'w': it has" in run("show", each, "w", status=1)


def test_statistics_without_a_number(tmp_path):
    save({"x": np.array([np.inf, np.nan, 0.0]), "big": np.full(3, 1.7e308)}, tmp_path / "a.h5")
    numbers = found("show", tmp_path / "a.h5", "x")["statistics"]
    assert numbers == {"elements": 3, "zeros": 1, "nan": 1, "infinite": 1} | dict.fromkeys(
        ("min", "max", "mean", "std"), 0
    )
    assert found("show", tmp_path / "a.h5", "big")["statistics"]["mean"] is None


def test_verify(each):
    (report,) = found("verify", each)["files"]
    assert report["arrays"] == len(VALUES)
    assert report["with_checksum"] == (0 if each.suffix == ".safetensors" else len(VALUES))
    assert "7 arrays read" in run("verify", each)


@pytest.mark.parametrize("suffix", [".h5", ".npz"])
def test_verify_finds_a_bit(file, suffix):
    path = file.with_suffix(suffix)
    if path != file:
        run("convert", file, path)
    data = bytearray(path.read_bytes())
    place = data.index(VALUES["model/w"].tobytes())
    data[place + 9] ^= 1
    path.write_bytes(data)
    (report,) = found("verify", path, status=1)["files"]
    (problem,) = report["problems"]
    assert "'model/w'" in problem
    assert "problem: " in run("verify", path, file.with_name("none"), status=1)


def test_verify_leaves_out_strings(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as other:
        other["text"], other["x"] = ["a", "b"], np.arange(3)
    (report,) = found("verify", tmp_path / "a.h5")["files"]
    assert (report["arrays"], report["with_checksum"]) == (1, 0)
    assert "only numbers are read" in run("show", tmp_path / "a.h5", "text", status=1)
    assert "only numbers are read" in run("convert", tmp_path / "a.h5", tmp_path / "b.npz", status=1)
    assert not (tmp_path / "b.npz").exists()


def test_diff(each, file):
    report = found("diff", file, each)
    assert report == {"same": True, "only_a": [], "only_b": [], "differ": [], "common": len(VALUES)}
    assert "7 of 7 arrays in both are the same" in run("diff", each, file)
    other = {name: value.copy() for name, value in VALUES.items() if name != "flags"}
    other["model/w"][1] += [0.5, np.nan, 0.25]
    other["model/half"] = other["model/half"].astype("f4")
    other["small"] = np.zeros((2, 1), "i1")
    other["steps"] += 1  # float64 has no such numbers
    other["new"] = np.array(1)
    save(other, file.with_name("b.h5"))
    report = found("diff", each, file.with_name("b.h5"), status=1)
    assert (report["same"], report["only_a"], report["only_b"]) == (False, ["flags"], ["new"])
    differ = {line["name"]: line for line in report["differ"]}
    assert sorted(differ) == ["model/half", "model/w", "small", "steps"]
    assert (differ["model/w"]["elements"], differ["model/w"]["max_abs_difference"]) == (3, 0.5)
    assert (differ["model/half"]["dtypes"], differ["model/half"]["elements"]) == (["bfloat16", "float32"], 0)
    assert (differ["small"]["shapes"], differ["small"]["elements"]) == ([[2], [2, 1]], None)
    assert differ["steps"]["elements"] == 1
    text = run("diff", each, file.with_name("b.h5"), status=1)
    assert "only in" in text
    assert "3 elements not equal, by 0.5 at most" in text
    assert "2 of 6 arrays" in text


@pytest.mark.parametrize("suffix", ["", ".h5", ".npz", ".safetensors"])
def test_convert_there_and_back(each, suffix, tmp_path):
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    report = found("convert", each, tmp_path / f"there{suffix}")
    assert (report["arrays"], report["bytes"]) == (7, (tmp_path / f"there{suffix}").stat().st_size)
    run("convert", tmp_path / f"there{suffix}", tmp_path / "back.h5")
    got = load_arrays(tmp_path / "back.h5", VALUES)
    for name, value in VALUES.items():
        assert got[name].dtype == value.dtype
        np.testing.assert_array_equal(got[name], value)


def test_other_programs_read_what_is_written(file):
    run("convert", file, file.with_suffix(".npz"))
    with np.load(file.with_suffix(".npz"), allow_pickle=False) as archive:
        np.testing.assert_array_equal(archive["model/w"], VALUES["model/w"])
        np.testing.assert_array_equal(archive["model/half"].view(ml_dtypes.bfloat16), VALUES["model/half"])
    library = pytest.importorskip("safetensors.numpy")
    run("convert", file, file.with_suffix(".safetensors"))
    got = library.load_file(file.with_suffix(".safetensors"))
    assert got["model/half"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got["model/w"], VALUES["model/w"])
    np.savez_compressed(file.with_name("own.npz"), x=np.asfortranarray(np.ones((2, 3), ">f4")))
    run("convert", file.with_name("own.npz"), file.with_name("own.h5"))
    got = load_arrays(file.with_name("own.h5"))["x"]
    assert got.dtype == np.dtype("f4")
    assert got.shape == (2, 3)
    assert got.all()


def test_names_of_a_map(file, tmp_path):
    names = tmp_path / "names.json"
    names.write_text(json.dumps({"model/w": "transformer.w", "flags": None}))
    run("convert", file, tmp_path / "b.npz", "--map", names)
    shown = [line["name"] for line in found("show", tmp_path / "b.npz")["arrays"]]
    assert "transformer.w" in shown
    assert "steps" in shown
    assert not {"model/w", "flags"} & {*shown}
    for text, told in (
        ('{"nothing": "x"}', "names 'nothing': "),
        ('{"steps": "small"}', "gives two the same name"),
        (json.dumps(dict.fromkeys(VALUES)), "leaves no array"),
        ("[]", "names.json: it is not JSON like"),
        ('{"steps": 3}', "names.json: it is not JSON like"),
        ("[" * 100_000, "names.json: it is not JSON like"),
        ("", "names.json: it is not JSON like"),
    ):
        names.write_text(text)
        assert told in run("convert", file, tmp_path / "c.npz", "--map", names, status=1)
    names.write_text('{"steps": "flags/steps"}')
    assert "cannot both be in a file" in run("convert", file, tmp_path / "c.h5", "--map", names, status=1)
    assert not (tmp_path / "c.npz").exists()
    assert not (tmp_path / "c.h5").exists()


def test_what_cannot_be_converted(file):
    assert "does not say the format" in run("convert", file, file.with_suffix(".pt"), status=2)
    assert "exists already" in run("convert", file, file, status=1)
    save({"z": np.ones(2, "c16")}, file.with_name("z.h5"))
    pytest.importorskip("safetensors")
    assert "complex128" in run("convert", file.with_name("z.h5"), file.with_suffix(".safetensors"), status=1)
    assert not file.with_suffix(".safetensors").exists()


def test_without_the_library_of_safetensors(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    file.with_name("b.safetensors").write_bytes(bytes(20))
    for arguments in (("show", file.with_name("b.safetensors")), ("convert", file, file.with_suffix(".safetensors"))):
        assert "fix: pip install safetensors" in run(*arguments, status=1)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.h5", b"", "it is empty"),
        ("a.h5", b"text that is not arrays", "it is not an HDF5 file"),
        ("a.npy", b"\x93NUMPY\x01\x00", "it is an npy file"),
        ("a.npz", b"PK\x03\x04 and no more", "it cannot be read"),
        ("a.safetensors", b"\xff" * 8 + b'{"', "it cannot be read"),
        ("a", (1 << 40).to_bytes(8, "little") + b'{"a":', "it cannot be read"),
    ],
)
def test_files_that_are_not_of_arrays(tmp_path, name, content, told):
    if content[8:10] == b'{"':
        pytest.importorskip("safetensors")
    (tmp_path / name).write_bytes(content)
    for arguments in (("show",), ("verify",), ("diff", tmp_path / name)):
        assert told in run(*arguments, tmp_path / name, status=1)
    assert "there is no such file" in run("show", tmp_path, status=1)


def test_a_file_of_a_later_version(file):
    with h5py.File(file, "r+") as other:
        other.attrs["format_version"] = 2
    assert "a later version of mpistrat wrote it" in run("show", file, status=1)


def test_a_model_of_keras_is_explained_and_its_weights_are_shown_as_advised(tmp_path):
    weights = tmp_path / "model.weights.h5"
    with h5py.File(weights, "w") as written:
        written["layers/dense/vars/0"] = np.arange(6.0).reshape(2, 3)
    model = tmp_path / "x.keras"
    with zipfile.ZipFile(model, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.write(weights, weights.name)
    for command in (["show", model], ["ls", model], ["verify", model], ["diff", weights, model]):
        text = run(*command, status=1)
        assert "it is a model of Keras" in text, command
    arguments = re.search(r"`python (-m zipfile -e .*) FOLDER`, and give FOLDER/model.weights.h5", text)[1].split()
    subprocess.run([sys.executable, *arguments, tmp_path / "unpacked"], check=True, timeout=100)
    assert "layers/dense/vars/0" in run("show", tmp_path / "unpacked" / "model.weights.h5")


def test_no_mpi(file):
    program = """
import sys
from mpistrat.cli import main
file, folder = sys.argv[1:]
for arguments in (["ls", folder], ["verify", file], ["diff", file, file]):
    try:
        main(["checkpoint", *arguments])
    except SystemExit as end:
        assert not end.code, arguments
    assert "mpi4py.MPI" not in sys.modules, arguments
print("all ended")
"""
    command = [sys.executable, "-c", program, str(file), str(file.parent)]
    ended = subprocess.run(command, check=True, timeout=250, stdout=subprocess.PIPE, text=True)
    assert ended.stdout.endswith("all ended\n")


@pytest.mark.skipif(np.finfo(np.longdouble).eps == np.finfo("f8").eps, reason="long doubles are doubles")
@pytest.mark.parametrize("kind", [np.longdouble, np.clongdouble])
def test_long_doubles_differ_in_bits_that_float64_has_not(tmp_path, kind):
    least = np.finfo(np.longdouble).eps
    for name, value in (("a.h5", 1), ("b.h5", 1 + least)):
        save({"x": np.full(3, value, kind)}, tmp_path / name)
    report = found("diff", tmp_path / "a.h5", tmp_path / "b.h5", status=1)
    (line,) = report["differ"]
    assert (line["elements"], line["max_abs_difference"]) == (3, float(least))
