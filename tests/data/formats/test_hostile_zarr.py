"""Zarr stores that would run code in some version of zarr: nothing of them is opened."""

import json
import pickle
import shutil
import zipfile

import numpy as np
import pytest

from mpistrat.data import DataFileError, Dataset

zarr = pytest.importorskip("zarr", reason="zarr is not installed")
V2 = {"zarr_format": 2, "shape": [3], "chunks": [3], "order": "C", "compressor": None, "fill_value": 0, "filters": None}
V3 = {"zarr_format": 3, "node_type": "array", "shape": [3], "fill_value": 0, "attributes": {"name": "pickle jar"}}
HOSTILE = {
    "a pickle filter": (".zarray", {**V2, "dtype": "|O", "filters": [{"id": "pickle"}]}),
    "a pickle filter of numbers": (".zarray", {**V2, "dtype": "<i8", "filters": [{"id": "pickle", "protocol": 4}]}),
    "a pickle compressor": (".zarray", {**V2, "dtype": "<i8", "compressor": {"id": "Pickle"}}),
    "objects": (".zarray", {**V2, "dtype": "|O", "fill_value": "gASVBAAAAAAAAABLAS4="}),
    "fields of objects": (".zarray", {**V2, "dtype": [["a", "<i8"], ["b", "|O8"]]}),
    "a codec of numcodecs": ("zarr.json", {**V3, "data_type": "int64", "codecs": [{"name": "numcodecs.pickle"}]}),
    "a nested codec": (
        "zarr.json",
        {
            **V3,
            "data_type": "int64",
            "codecs": [{"name": "sharding_indexed", "configuration": {"codecs": [{"name": "pickle"}]}}],
        },
    ),
    "an object of version 3": ("zarr.json", {**V3, "data_type": {"name": "object"}, "codecs": [{"name": "bytes"}]}),
}


class Runs:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_is_run(tmp_path, name, inside, packed):
    file, metadata = HOSTILE[name]
    store = tmp_path / "a.zarr"
    array = store / "x" if inside else store
    array.mkdir(parents=True)
    if inside:
        (store / ".zgroup").write_text('{"zarr_format": 2}')
    (array / file).write_text(json.dumps(metadata))
    (array / "0").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    if packed:
        store = shutil.make_archive(str(store), "zip", store)
    with pytest.raises(DataFileError, match=r"a\.zarr.*(names the codec|Python objects)"):
        list(Dataset.from_zarr(store, "x" if inside else "."))
    assert not (tmp_path / "ran").exists()


def test_metadata_of_all_arrays_together(tmp_path):
    store = tmp_path / "a.zarr"
    store.mkdir()
    (store / ".zgroup").write_text('{"zarr_format": 2}')
    arrays = {"x/.zarray": {**V2, "dtype": "<i8", "filters": [{"id": "pickle"}]}}
    (store / ".zmetadata").write_text(json.dumps({"zarr_consolidated_format": 1, "metadata": arrays}))
    with pytest.raises(DataFileError, match="names the codec"):
        len(Dataset.from_zarr(store, "x"))


def test_a_packed_store_is_not_opened(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataFileError, match="unpack it"):
        len(Dataset.from_zarr(tmp_path / "a.zip", "x"))


def test_chunks_that_are_large_when_unpacked(tmp_path, monkeypatch):
    made = zarr.open(str(tmp_path / "a.zarr"), mode="w", shape=(9, 200_000), chunks=(3, 200_000), dtype="i4")
    made[:] = np.ones((9, 200_000))
    monkeypatch.setenv("MPISTRAT_DATA_BLOCK_BYTES", "1000")
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for path in (tmp_path / "a.zarr").rglob("*"):
            packed.writestr(str(path.relative_to(tmp_path / "a.zarr")), b"0" * 5000 if path.is_file() else b"")
    with pytest.raises(DataFileError, match=r"unpacked, has 5000 bytes"):
        len(Dataset.from_zarr(tmp_path / "a.zip"))


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_metadata_that_is_no_json(tmp_path, text):
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / ".zarray").write_text(text)
    with pytest.raises(DataFileError, match="is not JSON"):
        len(Dataset.from_zarr(tmp_path / "a.zarr", "."))
