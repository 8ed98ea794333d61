"""Files of a few bytes that describe more than a memory holds."""

import json
import resource
import sys
import time

import h5py
import numpy as np
import pytest

from mpistrat.data import DataFileError, Dataset


@pytest.fixture(autouse=True)
def soon():
    """See that each test takes seconds, and no gigabytes."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.monotonic() - began < 10
    if sys.platform == "linux":
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10


@pytest.mark.parametrize("power", [30, 34, 62])
def test_many_chunks_that_were_never_written(tmp_path, power):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (1 << power,), "u1", chunks=(max(1, 1 << power >> 40),))
        file.create_dataset("filled", (1 << 30,), "u1", chunks=(1,), fillvalue=3)
    with pytest.raises(DataFileError, match=r"a\.h5', dataset 'x': some of its rows were never written, rows 0 to"):
        len(Dataset.from_hdf5(tmp_path / "a.h5", "x"))
    assert next(iter(Dataset.from_hdf5(tmp_path / "a.h5", "filled").batch(2))).tolist() == [3, 3]


def test_the_number_of_chunks(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(20), chunks=(1,))
    monkeypatch.setenv("MPISTRAT_DATA_BLOCKS", "19")
    with pytest.raises(DataFileError, match=r"a\.h5', dataset 'x': it has 20 chunks or more, and MPISTRAT_DATA_BLOCKS"):
        len(Dataset.from_hdf5(tmp_path / "a.h5", "x"))
    monkeypatch.setenv("MPISTRAT_DATA_BLOCKS", "20")
    assert list(Dataset.from_hdf5(tmp_path / "a.h5", "x")) == list(range(20))


@pytest.mark.parametrize("shape", [(1 << 29,), (3, 1 << 40)])
def test_a_store_of_many_chunks(tmp_path, shape):
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    zarr.open(str(tmp_path / "a.zarr"), mode="w", shape=shape, chunks=(1,) * len(shape), dtype="i8")
    with pytest.raises(DataFileError, match=r"a\.zarr.* MPISTRAT_DATA_BLOCKS"):
        len(Dataset.from_zarr(tmp_path / "a.zarr", "."))


def test_a_store_of_negative_length(tmp_path):
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    zarr.open(str(tmp_path / "a.zarr"), mode="w", shape=4, chunks=4, dtype="i8")
    (path,) = (each for name in (".zarray", "zarr.json") if (each := tmp_path / "a.zarr" / name).exists())
    path.write_text(json.dumps({**json.loads(path.read_text()), "shape": [-4]}))
    with pytest.raises(DataFileError, match=r"a\.zarr"):
        len(Dataset.from_zarr(tmp_path / "a.zarr", "."))


def test_a_large_row(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (3, 1 << 40), "u1", chunks=(1, 1 << 20), fillvalue=1)
    with pytest.raises(DataFileError, match=r"a row has 1099511627776 bytes, and MPISTRAT_DATA_BLOCK_BYTES="):
        next(iter(Dataset.from_hdf5(tmp_path / "a.h5", "x").batch(1)))


def test_a_large_row_group(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": np.zeros(1 << 20)}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    monkeypatch.setenv("MPISTRAT_DATA_BLOCK_BYTES", str(1 << 20))
    with pytest.raises(DataFileError, match=r"a\.parquet.*a block of 1048576 rows has 8388608 bytes"):
        list(Dataset.from_parquet(tmp_path / "a.parquet", "x"))


@pytest.mark.parametrize("start", [b"", b"x\n", b'x\n"'])
def test_a_long_line(tmp_path, start, monkeypatch):
    with open(tmp_path / "a.csv", "wb") as file:
        file.write(start)
        file.truncate(2_000_000_000)
    monkeypatch.setenv("MPISTRAT_DATA_BLOCK_BYTES", str(1 << 20))
    with pytest.raises(DataFileError, match=r"a\.csv.*the line of row 0 has 1048577 bytes"):
        len(Dataset.from_csv(tmp_path / "a.csv", "x"))


def test_a_long_line_of_text(tmp_path, monkeypatch):
    monkeypatch.setenv("MPISTRAT_DATA_BLOCK_BYTES", str(1 << 20))
    for end in ("\n", "\r"):  # a file without "\n" is one piece
        (tmp_path / "a.txt").write_text(f"1{end}" + "2" * 3_000_000, newline="")
        with pytest.raises(DataFileError, match=r"a\.txt.*a line from row 0 on has [0-9]+ bytes"):
            len(Dataset.from_text(tmp_path / "a.txt"))


def test_a_long_header(tmp_path):
    with open(tmp_path / "a.npy", "wb") as file:
        file.write(b"\x93NUMPY\x02\x00\xff\xff\xff\xff")
        file.truncate(1 << 32)
    with pytest.raises(DataFileError, match=r"a\.npy.*not an npy file"):
        len(Dataset.from_npy(tmp_path / "a.npy"))
