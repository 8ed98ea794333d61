"""The formats that the first bytes of a file tell, for files that are given to the reader of another format."""

from __future__ import annotations

import contextlib
import os

from mpistrat.data.errors import DataFileError

# The first bytes, what such a file is, and what reads it.
_SIGNATURES = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "Dataset.from_hdf5 (from_netcdf for netCDF)"),
    (b"PAR1", "a Parquet file", "Dataset.from_parquet"),
    (b"\x93NUMPY", "an npy file", "Dataset.from_npy"),
    (b"PK\x03\x04", "a zip archive", "np.load and Dataset.from_arrays for an npz file, or unpack it"),
    (b"CDF", "a netCDF file of version 3", "`nccopy -k netCDF-4` to convert it, then Dataset.from_netcdf"),
    (b"ARROW1", "an Arrow file", "pyarrow to write it as Parquet, then Dataset.from_parquet"),
    (b"\x1f\x8b", "compressed by gzip", "gunzip first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "zstd -d first"),
)
_OF_ZARR = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
_LONGEST = max(len(each) for each, _, _ in _SIGNATURES)


def told(path: str) -> str:
    """Return what a file or folder is, and what reads it. Empty if its first bytes do not tell."""
    if any(os.path.exists(os.path.join(path, name)) for name in _OF_ZARR):
        return "it is a Zarr store; fix: use Dataset.from_zarr"
    first = b""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        first = file.read(_LONGEST)
    found = (f"it is {what}; fix: use {reader}" for start, what, reader in _SIGNATURES if first.startswith(start))
    return next(found, "")


def not_of_format(path: str, reader: str, what: str) -> DataFileError:
    """Return the error for a file that its reader cannot read: what it is, or ``what`` if it is for this reader."""
    other = told(path)
    return DataFileError.of_file(path, other if other and reader not in other else what)
