"""Files that data files name: which are read, and which are refused."""

import json
import os

import h5py
import numpy as np
import pytest

from mpistrat.data import DataFileError, Dataset
from mpistrat.training.checkpoint.read import read
from mpistrat.training.checkpoint.write import write
from tests.data.formats.conftest import FORMATS

ROWS = np.arange(100, 104)


@pytest.fixture
def folder(tmp_path):
    """A folder in which a file can name another one, ``../other/b.h5``."""
    for name in ("here", "other"):
        (tmp_path / name).mkdir()
    with h5py.File(tmp_path / "other" / "b.h5", "w") as file:
        file["pad"], file["x"] = np.zeros(100), ROWS
    return tmp_path / "here"


def external_link(file, target):
    file["x"] = h5py.ExternalLink(target, "x")


def soft_link(file, target):
    file["g"] = h5py.ExternalLink(target, "/")
    file["x"] = h5py.SoftLink("g/x")


def external_storage(file, target):
    place = os.path.join(os.path.dirname(file.filename), target)
    file.create_dataset("x", (4,), ROWS.dtype, external=[(place, 0, 32)])


def virtual(file, target):
    layout = h5py.VirtualLayout((4,), ROWS.dtype)
    layout[:] = h5py.VirtualSource(target, "x", (4,))
    file.create_virtual_dataset("x", layout)


WAYS = [external_link, soft_link, external_storage, virtual]


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_in_several_files(folder, way):
    write({"x": np.arange(4), "y": np.arange(50)}, folder / "a.h5")
    with h5py.File(folder / "a.h5", "r+") as file:
        attributes = dict(file["x"].attrs)
        del file["x"]
        way(file, "../other/b.h5")
        if way in (external_storage, virtual):
            file["x"].attrs.update(attributes)
    with pytest.raises(DataFileError, match=r"a\.h5', dataset 'x': .*(a link|in other files), which no checkpoint"):
        read({"x": np.zeros(4, ROWS.dtype)}, folder / "a.h5")


@pytest.mark.parametrize("way", WAYS)
def test_the_root_of_the_data(folder, way, monkeypatch):
    with h5py.File(folder / "a.h5", "w") as file:
        way(file, "../other/b.h5")
    if way is not external_storage:
        assert list(Dataset.from_hdf5(folder / "a.h5", "x")) == ROWS.tolist()
    monkeypatch.setenv("MPISTRAT_DATA_ROOT", str(folder.parent))
    assert len(Dataset.from_hdf5(folder / "a.h5", "x")) == 4
    monkeypatch.setenv("MPISTRAT_DATA_ROOT", str(folder))
    with pytest.raises(DataFileError, match=r"here/a\.h5.*b\.h5' is outside of MPISTRAT_DATA_ROOT"):
        len(Dataset.from_hdf5(folder / "a.h5", "x"))
    (folder / "link.h5").symlink_to(folder.parent / "other" / "b.h5")
    with pytest.raises(DataFileError, match=r"link\.h5' is outside"):
        len(Dataset.from_hdf5(folder / "l*.h5", "x"))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("way", WAYS)
def test_a_pipe_in_place_of_a_file(folder, way):
    os.mkfifo(folder / "pipe")
    with h5py.File(folder / "a.h5", "w") as file:
        way(file, "pipe")
    with pytest.raises(DataFileError, match=r"a\.h5', dataset 'x': .*pipe' is not a regular file"):
        len(Dataset.from_hdf5(folder / "a.h5", "x"))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("form", ["hdf5", "npy", "csv", "parquet", "netcdf"])
def test_a_pipe_in_a_folder_of_data(tmp_path, form):
    end = FORMATS[form].end
    FORMATS[form].write(tmp_path / f"own.{end}", {"x": ROWS})  # skips without its package
    os.mkfifo(tmp_path / f"pipe.{end}")
    with pytest.raises(DataFileError, match=r"pipe.* is not a regular file"):
        len(FORMATS[form].read(tmp_path / f"*.{end}"))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("which", ["metadata", "chunk"])
def test_a_pipe_in_a_store(tmp_path, which):
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    store = tmp_path / "a.zarr"
    zarr.open(str(store), mode="w", shape=4, chunks=4, dtype="i8")[:] = ROWS
    assert list(Dataset.from_zarr(store, ".")) == ROWS.tolist()
    names = {"metadata": (".zarray", "zarr.json"), "chunk": ("0", "c/0")}[which]
    (path,) = (store / name for name in names if (store / name).exists())
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataFileError, match=r"a\.zarr.* is not a regular file"):
        list(Dataset.from_zarr(store, "."))


def test_a_manifest_names_no_file_that_the_data_file_does_not_name(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file["x"] = np.arange(4)
    manifest, secret = folder / "a.json", folder.parent / "other" / "b.h5"
    for _ in range(2):
        assert len(Dataset.from_hdf5(folder / "a.h5", "x", manifest=manifest)) == 4
    kept = json.loads(manifest.read_text())
    (column,) = kept["files"][0]["record"]["columns"]
    found = secret.stat()
    column["others"] = [
        {"kind": "OtherFile", "path": "../other/b.h5", "size": found.st_size, "mtime_ns": found.st_mtime_ns}
    ]
    column["layout"]["extents"][0].update(file=1, offset=0)
    manifest.write_text(json.dumps(kept))
    with pytest.raises(DataFileError, match=r"a\.json' is stale: file .*a\.h5' has another description"):
        list(Dataset.from_hdf5(folder / "a.h5", "x", manifest=manifest))


def test_a_virtual_dataset_of_itself(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        virtual(file, "b.h5")
    with h5py.File(folder / "b.h5", "w") as file:
        virtual(file, "a.h5")
    with pytest.raises(DataFileError, match=r"a\.h5', dataset 'x': its rows would lie in itself"):
        len(Dataset.from_hdf5(folder / "a.h5", "x"))
