"""Files that are given to the reader of another format, and names that are no files."""

import gzip
import struct

import numpy as np
import pytest

from mpistrat.data import DataFileError, Dataset, write_hdf5
from tests.data.formats.conftest import FORMATS

READERS = {"hdf5": "from_hdf5", "npy": "from_npy", "parquet": "from_parquet", "zarr": "from_zarr"}
COLUMNS = {"x": np.zeros(3), "y": np.zeros(3, int)}


@pytest.mark.parametrize("written", READERS)
@pytest.mark.parametrize("read", ["hdf5", "npy", "csv", "parquet", "zarr"])
def test_the_right_reader_is_named(tmp_path, written, read):
    if written == read:
        return
    form = FORMATS[written]
    path = tmp_path / f"a.{form.end}"
    form.write(path, COLUMNS)
    FORMATS[read].write(tmp_path / f"own.{FORMATS[read].end}", COLUMNS)  # skips without its package
    with pytest.raises((DataFileError, IsADirectoryError), match=f"a.{form.end}.*: it is .*{READERS[written]}"):
        len(FORMATS[read].read(path))


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (gzip.compress(b"x,y\n1,2\n", mtime=0), "compressed by gzip; fix: use gunzip"),
        (b"PK\x03\x04rest", "zip archive"),
        (b"CDF\x01rest", "netCDF file of version 3"),
        (b"ARROW1rest", "Arrow file"),
        (b"\x28\xb5\x2f\xfdrest", "compressed by zstd"),
    ],
)
@pytest.mark.parametrize("read", ["hdf5", "npy", "csv"])
def test_what_no_format_reads(tmp_path, start, text, read):
    if read == "csv" and "gzip" in text:
        pytest.skip("it unpacks such files")
    (tmp_path / "a").write_bytes(start)
    with pytest.raises(DataFileError, match=text):
        len(FORMATS[read].read(tmp_path / "a"))


@pytest.mark.parametrize("shape", ["(-3,)", "(5, -1)"])
def test_a_negative_shape(tmp_path, shape):
    head = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bytes(40))
    with pytest.raises(DataFileError, match="its header has the shape"):
        len(Dataset.from_npy(path))
    path.write_bytes(b"\x93NUMPY\x09\x09" + bytes(40))
    with pytest.raises(DataFileError, match="it is not an npy file"):  # not: use from_npy
        len(Dataset.from_npy(path))


@pytest.mark.parametrize("url", ["s3://bucket/a.h5", "https://host/a.h5", "gs://bucket/*.h5"])
def test_urls(url):
    with pytest.raises(ValueError, match="is a URL"):
        Dataset.from_hdf5(["a.h5", url], "x")
    with pytest.raises(ValueError, match="is a URL"):
        write_hdf5(url, {"x": np.ones(3)})


@pytest.mark.parametrize("read", ["hdf5", "npy", "csv", "netcdf"])
def test_a_folder(tmp_path, read):
    end = FORMATS[read].end
    with pytest.raises(IsADirectoryError, match=rf"give a pattern such as .*\*\.{end}'"):
        len(FORMATS[read].read(tmp_path))
