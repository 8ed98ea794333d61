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
