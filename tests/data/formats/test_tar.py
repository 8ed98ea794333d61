"""Samples of tar archives are those of WebDataset, by number."""

import io
import json
import tarfile
import warnings

import numpy as np
import pytest

from mpistrat.data import DataFileError, Dataset, DatasetNotFoundError


def write(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def npy(value):
    out = io.BytesIO()
    np.save(out, value)
    return out.getvalue()


def sample(k, name=None):
    name = name or f"dir.x/s{k:03}"
    return [
        (f"{name}.x.npy", npy(np.arange(3) + k)),
        (f"{name}.CLS", b"%d\n" % (k % 3)),
        (f"{name}.json", json.dumps({"k": k}).encode()),
        (f"{name}.raw", bytes([k])),
    ]


def test_samples_by_number(tmp_path):
    write(tmp_path / "a.tar", [("README", b"no sample"), *(each for k in range(7) for each in sample(k))])
    write(tmp_path / "b.tar", [each for k in range(7, 12) for each in reversed(sample(k))])
    fields = {"x": "x.npy", "label": "cls", "text": "json", "raw": "bin;raw"}
    rows = Dataset.from_tar(str(tmp_path / "*.tar"), fields)
    assert len(rows) == 12
    for k in (11, 0, 6):
        assert rows[k]["x"].tolist() == [k, k + 1, k + 2]
        assert (rows[k]["label"], json.loads(rows[k]["text"]), rows[k]["raw"]) == (k % 3, {"k": k}, bytes([k]))
    numbers = [n for batch in rows.shuffle(seed=1).batch(5) for n in batch["x"][:, 0].tolist()]
    assert sorted(numbers) == [*range(12)] != numbers
    assert rows.element_spec["label"].dtype == np.int64
    labels = [int(label) for label in rows.filter(lambda label: label == 1, by="label").map(lambda row: row["label"])]
    assert labels == [1] * 4
    assert list(Dataset.from_tar(tmp_path / "a.tar", "cls", decode=False))[:2] == [b"0\n", b"1\n"]


def test_names_are_cut_at_the_first_dot_of_the_last_part(tmp_path):
    write(tmp_path / "a.tar", [each for k, name in enumerate(["a", "b.c/d", "b/d e", "f"]) for each in sample(k, name)])
    assert [int(raw[0]) for raw in Dataset.from_tar(tmp_path / "a.tar", "raw")] == [0, 1, 2, 3]


def test_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    members = []
    for k, end in enumerate(["png", "bmp", "png"]):
        out = io.BytesIO()
        image.new("RGB", (4, 3 + k), (k, 0, 0)).save(out, end)
        members += [(f"{k}.{end}", out.getvalue()), (f"{k}.cls", b"%d" % k)]
    write(tmp_path / "a.tar", members)
    images, labels = next(iter(Dataset.from_tar(tmp_path / "a.tar", ("png;bmp", "cls"), size=(2, 5)).batch(3)))
    assert images.shape == (3, 2, 5, 3)
    assert images[:, 0, 0, 0].tolist() == labels.tolist() == [0, 1, 2]
    with pytest.raises(DataFileError, match="shape"):
        list(Dataset.from_tar(tmp_path / "a.tar", "png;bmp"))


def test_bad_samples(tmp_path):
    path = tmp_path / "a.tar"
    members = [each for k in range(4) for each in sample(k)]
    members[5] = ("dir.x/s001.cls", b"one")
    del members[9]
    write(path, members)
    with pytest.raises(DatasetNotFoundError, match=r"sample 'dir.x/s002' has no field 'cls'"):
        len(Dataset.from_tar(path, "cls"))
    with pytest.warns(UserWarning, match=r"2 rows .* left out: sample 'dir.x/s001' .*one.*; sample 'dir.x/s002'"):
        rows = [int(x) for x in Dataset.from_tar(path, "cls", on_bad_row="skip")]
    assert rows == [0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(Dataset.from_tar(path, "raw", on_bad_row="skip")) == 4
    write(path, [("a.x", b""), ("b.x", b""), ("a.y", b"")])
    with pytest.raises(DataFileError, match=r"sample 'a' .* not in one piece"):
        len(Dataset.from_tar(path, "x"))
    path.write_bytes(b"no tar" * 200)
    with pytest.raises(DataFileError, match="not a tar archive"):
        len(Dataset.from_tar(path, "x"))


@pytest.mark.parametrize("damage", ["header", "cut", "cut in a member", "joined"])
def test_what_the_library_takes_for_the_end(tmp_path, damage):
    """Python's tarfile ends silently at a header that it cannot read: samples would be missing."""
    path = tmp_path / "a.tar"
    write(path, [(f"{k}.cls", b"%d" % k) for k in range(10)])
    raw = bytearray(path.read_bytes())
    assert len(Dataset.from_tar(path, "cls")) == 10
    if damage == "header":
        raw[4 * 1024 + 20] ^= 1
    path.write_bytes({"header": raw, "cut": raw[:4096], "joined": raw + raw}.get(damage, raw[:4700]))
    with pytest.raises(DataFileError, match=r"(does not end as a tar archive|not a tar archive)"):
        len(Dataset.from_tar(path, "cls"))


def test_arrays_of_another_dtype_are_not_cast(tmp_path):
    path = tmp_path / "a.tar"
    arrays = [1, 2], [1.5, 2.7], [3, 4]
    write(path, [(f"{k}.npy", npy(np.array(each))) for k, each in enumerate(arrays)])
    with pytest.raises(DataFileError, match=r"float64 of shape \(2,\), and the first one int64"):
        list(Dataset.from_tar(path, "npy"))
    with pytest.warns(UserWarning, match="1 row cannot be read"):
        rows = [row.tolist() for row in Dataset.from_tar(path, "npy", on_bad_row="skip")]
    assert rows == [[1, 2], [3, 4]]


@pytest.mark.parametrize("content", [b"", b"no array", npy(np.arange(3))[:-1], npy(np.arange(3)) + b"x"])
def test_bad_arrays_are_left_out(tmp_path, content):
    path = tmp_path / "a.tar"
    write(path, [("a.npy", npy(np.arange(3))), ("b.npy", content), ("c.h5", b"")])
    with pytest.warns(UserWarning, match="2 rows cannot be read"):
        assert [row.tolist() for row in Dataset.from_tar(path, "npy", on_bad_row="skip")] == [[0, 1, 2]]


def test_only_images_are_images(tmp_path):
    write(tmp_path / "a.tar", [("a.h5", b"x"), ("a.pdf", b"y"), ("b.h5", b"z"), ("b.pdf", b"")])
    assert [*Dataset.from_tar(tmp_path / "a.tar", ("h5", "pdf"))] == [(b"x", b"y"), (b"z", b"")]
