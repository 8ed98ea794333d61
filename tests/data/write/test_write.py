"""Tests of writing and dividing files: the new files are compared with h5py, and read again."""

import glob
import json
import os
from types import SimpleNamespace

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpistrat.data import Dataset, DatasetMismatchError, EmptyDatasetError, FilterUnavailableError
from mpistrat.data import write_hdf5 as write
from mpistrat.data.write.write import shard

settings_ = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
TYPES = ("x", "g/y", "text", "fixed", "ragged", "compound", "enum", "pairs", "flag", "wave")


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    """Return a file with datasets of many types, with attributes."""
    path, n = tmp_path_factory.mktemp("varied") / "in.h5", 50
    with h5py.File(path, "w") as f:
        f.attrs["of"] = "root"
        f.create_group("g").attrs["of"] = "group"
        x = f.create_dataset("x", data=np.random.default_rng(0).random((n, 3)).astype(">f4"), chunks=(7, 3))
        x.attrs["unit"] = "m"
        f["g/y"] = np.arange(n)
        f.create_dataset("text", data=["é" * (i % 9) for i in range(n)], dtype=h5py.string_dtype())
        fixed = h5py.string_dtype("utf-8", 8)
        f.create_dataset("fixed", data=np.array([f"é{i}".encode() for i in range(n)], fixed))
        ragged = f.create_dataset("ragged", (n,), h5py.vlen_dtype("i4"))
        for i in range(n):
            ragged[i] = np.arange(i % 5)
        f["compound"] = np.zeros(n, [("n", ">i2"), ("v", "<f4", (2,))])
        f.create_dataset("enum", data=np.arange(n) % 2, dtype=h5py.enum_dtype({"A": 0, "B": 1}))
        kind = h5py.h5t.py_create(np.dtype(("f4", (2,))), logical=True)
        pairs = h5py.h5d.create(f.id, b"pairs", kind, h5py.h5s.create_simple((n,)))
        pairs.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(2 * n, dtype="f4"), kind)
        f["flag"] = np.arange(n) % 2 == 0
        f["wave"] = np.arange(n) * 1j
    return path


def same(one, other):
    with h5py.File(one) as a, h5py.File(other) as b:
        assert dict(a.attrs) == dict(b.attrs)
        assert dict(a["g"].attrs) == dict(b["g"].attrs)
        for name in TYPES:
            assert a[name].id.get_type().equal(b[name].id.get_type()), name
            assert dict(a[name].attrs) == dict(b[name].attrs)
            assert all(np.array_equal(p, q) for p, q in zip(a[name][:], b[name][:], strict=True)), name


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"compress": "zstd", "chunk": 4}, {"compress": "gzip"}])
def test_many_files_from_one_and_back(varied, tmp_path, options):
    made = shard([str(varied)], tmp_path / "many", 7, **options)
    assert [path.name for path in made] == [f"in-{i:05}-of-00007.h5" for i in range(7)]
    rows = [h5py.File(path)["x"].shape[0] for path in made]
    assert sum(rows) == 50
    assert max(rows) - min(rows) <= 1
    with h5py.File(made[0]) as file:
        plist = file["x"].id.get_create_plist()
        filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
        assert [each for each in filters if each != h5py.h5z.FILTER_SHUFFLE] == {"gzip": [1], "zstd": [32015]}.get(
            options.get("compress"), []
        )
        assert file["x"].chunks == ((4, 3) if "chunk" in options else (8, 3) if options else None)
    (back,) = shard([str(path) for path in made], tmp_path / "one", 1)
    assert back.name == "in-00000-of-00001.h5"
    same(varied, back)
    assert not glob.glob(str(tmp_path / "*" / ".*"))


@settings_
@given(
    rows=st.integers(1, 60),
    files=st.integers(1, 7),
    chunk=st.none() | st.integers(1, 90),
    seed=st.none() | st.integers(0, 3),
)
def test_arrays_and_datasets(tmp_path, rows, files, chunk, seed):
    files = min(rows, files)
    paths = [tmp_path / f"{i}.h5" for i in range(files)]
    tree = {"x": np.arange(rows * 2.0).reshape(rows, 2), "g": {"y": np.arange(rows)}}
    expected = np.arange(rows)
    source = tree
    if seed is not None:
        source = Dataset.from_arrays(tree).shuffle(seed=seed)
        expected = np.array([int(row["g"]["y"]) for row in Dataset.from_arrays(tree).shuffle(seed=seed)])
    write(paths, source, chunk=chunk, overwrite=True)
    (batch,) = Dataset.from_hdf5(paths, {"x": "x", "y": "g/y"}).batch(rows)
    assert batch["y"].tolist() == expected.tolist()
    assert batch["x"].tolist() == tree["x"][expected].tolist()


def test_batches_of_unknown_number(tmp_path):
    write(tmp_path / "a.h5", ({"x": np.full((n, 2), n)} for n in (1, 3, 2)), compress="gzip")
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["x"][:, 0].tolist() == [1, 3, 3, 3, 2, 2]
    write(tmp_path / "b.h5", Dataset.range(5).batch(2).map(lambda x: {"x": x}))
    write(tmp_path / "c.h5", Dataset.from_iterable(range(5)))
    for name in "bc":
        assert h5py.File(tmp_path / f"{name}.h5")["x"][:].tolist() == list(range(5))
    with pytest.raises(DatasetMismatchError, match="after 1 rows"):
        write(tmp_path / "d.h5", [{"x": [1]}, {"y": [1]}].__iter__())
    with pytest.raises(ValueError, match="no rows"):
        write(tmp_path / "d.h5", iter([]))
    assert sorted(os.listdir(tmp_path)) == ["a.h5", "b.h5", "c.h5"]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (np.zeros(2, "i4"), np.array([1.5, 2.7])),
        (np.zeros(2, "i1"), np.array([300, 400])),
        (np.zeros((2, 3)), np.ones((2, 1))),
        (np.zeros((2, 3)), np.ones(2)),
        (np.array([b"ab", b"c"]), np.array([b"abcdef", b"c"])),
        (np.zeros(2, [("a", "i4")]), np.zeros(2, [("a", "f8")])),
    ],
)
def test_rows_that_would_not_be_what_they_were(tmp_path, first, then):
    with pytest.raises(DatasetMismatchError, match=r"dataset 'x' has rows of .* from row 2 on are of .*; fix: "):
        write(tmp_path / "a.h5", iter([first, then]))
    write(tmp_path / "a.h5", iter([then, first] if first.dtype.kind == "S" else [first, first]))
    assert os.listdir(tmp_path) == ["a.h5"]


def test_a_function_whose_type_changes(tmp_path):
    dataset = Dataset.range(6).map(lambda x: int(x) if x < 3 else float(x) + 0.5)
    with pytest.raises(TypeError, match=r"row 3 of a batch has dtype float64 in a column of int64.*3\.5"):
        write(tmp_path / "a.h5", dataset)
    assert os.listdir(tmp_path) == []


def test_memory_is_bounded(tmp_path, monkeypatch):
    seen = []

    class Large:
        shape, dtype = (1 << 20, 16), np.dtype("f8")

        def __len__(self):
            return self.shape[0]

        def __getitem__(self, run):
            seen.append((run.stop - run.start) * 128)
            return np.zeros((run.stop - run.start, 16))

    monkeypatch.setattr(h5py.Dataset, "__setitem__", lambda *args: None)
    write([tmp_path / "a.h5", tmp_path / "b.h5"], {"x": Large()})
    assert sum(seen) == 128 << 20
    assert max(seen) <= 8 << 20


def test_nothing_is_overwritten_and_nothing_left(tmp_path):
    rows = {"x": np.arange(6)}
    write(tmp_path / "1.h5", rows)
    before = (tmp_path / "1.h5").read_bytes()
    with pytest.raises(FileExistsError, match=r"1\.h5 exists already"):
        write([tmp_path / f"{i}.h5" for i in range(3)], rows)

    class Broken:
        shape, dtype = (6,), np.dtype("i8")

        def __len__(self):
            return 6

        def __getitem__(self, run):
            if run.start:
                # Another program makes the file first.
                (tmp_path / "2.h5").write_bytes(b"theirs")
            return np.arange(run.start, run.stop)

    with pytest.raises(FileExistsError, match=r"2\.h5 exists already"):
        write([tmp_path / "0.h5", tmp_path / "2.h5"], {"x": Broken()})
    assert sorted(os.listdir(tmp_path)) == ["1.h5", "2.h5"]
    assert (tmp_path / "2.h5").read_bytes() == b"theirs"
    assert (tmp_path / "1.h5").read_bytes() == before
    write(tmp_path / "1.h5", {"x": np.arange(3)}, overwrite=True)
    assert len(Dataset.from_hdf5(tmp_path / "1.h5", "x")) == 3


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda p: write([], {"x": [1]}), ValueError, "no file"),
        (lambda p: write([p, p], {"x": [1, 2]}), ValueError, "same name"),
        (lambda p: write(p, {"x": [1]}, chunk=0), ValueError, "at least 1, not 0"),
        (lambda p: write(p, {"x": [1]}, compress="zip"), ValueError, "gzip, zstd, not 'zip'"),
        (lambda p: write(p, {"x": [1], "y": [1, 2]}), DatasetMismatchError, "equally long"),
        (lambda p: write(p, {"x": np.float64(1)}), ValueError, "scalar"),
        (lambda p: write(p, {"x": ([1], [2])}), TypeError, "'x' is a tuple"),
        (lambda p: write(p, (np.arange(3), np.arange(3))), TypeError, "rows must be named: give a dict"),
        (lambda p: write(p, {"x": [[1], [2, 3]]}), TypeError, "'x': list cannot be converted.*padded"),
        (lambda p: write(p, [[1], [2, 3]]), TypeError, "'x': list cannot be converted.*padded"),
        (lambda p: write(p, {"x": np.array([[1], [2]], object)}), DatasetMismatchError, r"row 0 has .*\(1\)"),
        (lambda p: write(p, {"x": np.array(["a", 2], object)}), DatasetMismatchError, r"row 1 has .*\(2\)"),
        (lambda p: write(p, iter([np.array(["a", None], object)])), DatasetMismatchError, "row 1 .*None"),
        (lambda p: write(p, {"x": np.ones(2, ml_dtypes.bfloat16)}), TypeError, "no type for bfloat16.*'f4'"),
        (lambda p: write(p, {"x": np.array(["2020"], "M8[D]")}), TypeError, "no type for datetime64"),
        (lambda p: write(p, SimpleNamespace(columns=["a"], shape=(2, 1))), TypeError, "to_numpy"),
        (lambda p: write(p, {3: [1]}), TypeError, "not 3"),
        (lambda p: write([p, p.with_name("b")], {"x": [1]}), ValueError, "1 rows for 2 files"),
        (lambda p: write([p, p.with_name("b")], iter([])), ValueError, "number of rows is known"),
        (lambda p: write(p.parent / "no" / "a.h5", {"x": [1]}), FileNotFoundError, "is not a folder"),
        (lambda p: write(p, 3), TypeError, "rows must be"),
        (lambda p: write(p, "t", np.ones(2)), TypeError, r"write_hdf5\(path, \{name: array\}\)"),
        (lambda p: write(p, np.ones(2), "t"), TypeError, r"write_hdf5\(path, \{name: array\}\)"),
    ],
)
def test_wrong_arguments(tmp_path, call, error, text):
    with pytest.raises(error, match=text):
        call(tmp_path / "a.h5")
    assert os.listdir(tmp_path) == []


def test_zstd_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "hdf5plugin", None)
    with pytest.raises(FilterUnavailableError, match="pip install hdf5plugin"):
        write(tmp_path / "a.h5", {"x": [1]}, compress="zstd")


# --- what stands beside rows --------------------------------------------------------------


def beside(path, n=6, **more):
    """Return a file of rows, and the scalars and attributes that programs often keep with them."""
    with h5py.File(path, "w") as f:
        f["x"], f["y"] = np.arange(n * 3.0).reshape(n, 3), np.arange(n)
        f["g/mean"] = np.float32(1.5)
        f["g/mean"].attrs["unit"] = "m"
        f["g"].attrs["of"] = "group"
        f["version"] = "two"
        f["unknown"] = np.float64("nan")
        f["none"] = h5py.Empty("f4")
        for name, value in more.items():
            f[name] = value
    return str(path)


def test_single_values_go_to_every_new_file(tmp_path):
    path = beside(tmp_path / "a.h5")
    made = shard([path], tmp_path / "many", 3)
    (back,) = shard([str(each) for each in made], tmp_path / "one", 1)
    for each in (*made, back):
        with h5py.File(each) as f:
            assert sorted(f) == ["g", "none", "unknown", "version", "x", "y"]
            assert (f["g/mean"][()], f["g/mean"].dtype, dict(f["g/mean"].attrs)) == (1.5, "f4", {"unit": "m"})
            assert f["g"].attrs["of"] == "group"
            assert f["version"].asstr()[()] == "two"
            assert np.isnan(f["unknown"][()])
            assert f["none"].shape is None
    with h5py.File(back) as f:
        assert f["y"][:].tolist() == list(range(6))
    (some,) = shard([path], tmp_path / "some", 1, datasets=["x", "g/mean"])
    with h5py.File(some) as f:
        assert sorted(f) == ["g", "x"]
        assert f["g/mean"][()] == 1.5


def test_what_cannot_be_divided_is_named(tmp_path):
    path = beside(tmp_path / "a.h5", classes=[1, 2])
    with pytest.raises(
        DatasetMismatchError, match=r"'classes' has 2 rows and dataset 'x' has 6.*--dataset x --dataset y"
    ):
        shard([path], tmp_path / "out", 2)
    assert len(shard([path], tmp_path / "out", 2, datasets=["x", "y"])) == 2
    one = beside(tmp_path / "b.h5")
    for name, more, text in (
        ("c", {"z": np.arange(6)}, r"c\.h5' has the dataset 'z', but file .*b\.h5' lacks it"),
        ("d", {"scale": 2.0}, r"d\.h5' has the dataset 'scale', but file"),
    ):
        with pytest.raises(DatasetMismatchError, match=text):
            shard([one, beside(tmp_path / f"{name}.h5", **more)], tmp_path / "more", 1)
    other = beside(tmp_path / "e.h5")
    with h5py.File(other, "r+") as f:
        f["g/mean"][()] = 2.5
    with pytest.raises(DatasetMismatchError, match=r"'g/mean' has the value 1\.5 .*b\.h5' and 2\.5 in .*--dataset x"):
        shard([one, other], tmp_path / "more", 1)
    with pytest.raises(EmptyDatasetError, match="none of the datasets 'version', 'none' has rows"):
        shard([one], tmp_path / "more", 1, datasets=["version", "none"])
    with h5py.File(tmp_path / "f.h5", "w") as f:
        f["version"] = 2
    with pytest.raises(EmptyDatasetError, match=r"only the scalars \['version'\]"):
        shard([str(tmp_path / "f.h5")], tmp_path / "more", 1)
    assert not list((tmp_path / "more").glob("*"))


@pytest.mark.full
def test_the_command_tells_what_is_no_row(tmp_path, run_alone):
    path = beside(tmp_path / "a.h5", classes=[1, 2], damaged=np.arange(6))
    with h5py.File(path, "r+") as f:
        del f["damaged"]
        f.create_dataset("damaged", (6,), "f4")  # rows that were never written
    bad = run_alone("-m", "mpistrat", "data", path)
    assert bad.status == 1
    bad.shows("problem: ", "dataset 'damaged'", "1 file, 6 rows", "x        float64 (3,), 24 bytes per row")
    with h5py.File(path, "r+") as f:
        del f["damaged"]
    shown = run_alone("-m", "mpistrat", "data", path).check()
    shown.shows(
        "1 file, 6 rows",
        "x        float64 (3,), 24 bytes per row",
        "g/mean   left out: it is a scalar",
        "none     left out: it has no data space",
        "classes  left out: it has 2 rows and dataset 'x' has 6",
    )
    told = json.loads(run_alone("-m", "mpistrat", "data", path, "--json").check().output)
    assert [each["name"] for each in told["datasets"]] == ["x", "y"]
    assert {"name": "version", "why": "is a scalar"} in told["beside"]
    run_alone("-m", "mpistrat", "data", path, "--dataset", "classes").check().shows("1 file, 2 rows")


def test_the_command_tells_that_there_is_no_row(tmp_path, run_alone):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("x", (0, 3), "f4")
    bad = run_alone("-m", "mpistrat", "data", tmp_path)
    assert bad.status == 1
    bad.shows("1 file, 0 rows", "problem: no row in 1 file")


# --- the commands -------------------------------------------------------------------------


@pytest.mark.full
def test_commands(varied, tmp_path, run_alone):
    def run(*arguments):
        return run_alone("-m", "mpistrat", *arguments)

    out = tmp_path / "out"
    ended = run("shard", varied, "-n", "4", "--out", out, "--dataset", "x", "--dataset", "g/y", "--name", "part")
    ended.check().shows("4 files", "part-00000-of-00004.h5 ... part-00003-of-00004.h5")
    again = run("shard", varied, "-n", "4", "--out", out, "--name", "part")
    assert again.status == 1
    again.shows("Error: ", "part-00000-of-00004.h5 exists already")
    shown = run("data", out, "--replicas", "2", "--replicas", "8", "--batch-size", "5").check()
    shown.shows("4 files, 50 rows", "float32 (3,), 12 bytes per row", "4 files: direct: contiguous", "too few files")
    spoilt = out / "part-00001-of-00004.h5"
    os.truncate(spoilt, spoilt.stat().st_size - 8)
    bad = run("data", out, "--json", "--replicas", "2", "--batch-size", "5")
    assert bad.status == 1
    told = json.loads(bad.output)
    assert "truncated" in told["problems"][0]
    assert [each["rows"] for each in told["files"]] == [13, 12, 12]
    (steps,) = told["policies"]
    assert (steps["DATA"], steps["OFF"], steps["replicas"]) == (8, 16, 2)
    # FILE: the first replica reads 13 + 12 rows in batches of 3, the second reads 12 in batches of 2.
    assert (steps["FILE"], steps["AUTO"]) == (9, 8)


AT_EXIT = """
import atexit, sys
import numpy as np
from mpistrat.data import write_hdf5

atexit.register(write_hdf5, sys.argv[1], {"x": np.arange(5.0)})
"""


def test_a_file_is_written_at_the_end_of_a_program(run_alone, tmp_path):
    """Then executors take no more work."""
    (tmp_path / "program.py").write_text(AT_EXIT)
    ended = run_alone(tmp_path / "program.py", tmp_path / "x.h5")
    assert ended.status == 0, str(ended)
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["x"][:].tolist() == [0, 1, 2, 3, 4]
