"""The format of a checkpoint file: arrays by name, with checksums.

It is an HDF5 file, which any HDF5 program reads. Each array is a contiguous dataset. Its attribute ``checksums`` holds
one number for each piece of it. Attributes of the file say how: ``checksum_bytes`` is the size of a piece, and
``checksum`` names the function. Files of other programs lack all three. A format that this version cannot read
would have a higher number than `VERSION` as attribute ``format_version``, which is 1 if missing. The group
`OF_REPLICAS` has what each virtual replica has of a variable that is synchronized on read, the BLAS of the chief, and
the boxes of arrays that the ranks wrote as blocks. Such an array has no checksums but these.

The function is XXH3 with 64 bits, seeded with the name of the variable. It sees bytes that are changed, exchanged or
missing, and values that stand under another name. On one core it takes 70 ms for 1 GB; a CRC-32C takes twice that.
HDF5 keeps checksums of its index, in the format that `FORMAT` chooses.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

CHECKSUMS = "checksums"
PIECE_BYTES = "checksum_bytes"
CHECKSUM = "checksum"
XXH3 = "xxh3_64"  # the only value of it that this version writes and reads
FORMAT_VERSION = "format_version"
VERSION = 1  # the highest that is read
FORMAT = ("v108", "v108")  # the first with checksums in the index; read by HDF5 1.8 and later
DTYPE = "dtype"  # of a dataset: the name of a dtype that HDF5 lacks, stored as bits
OF_REPLICAS = "__replicas__/"  # before the names of what only virtual replicas read
BLAS = OF_REPLICAS + "blas"  # what `mpistrat.runtime.affinity.blas` returns, in UTF-8
BLAS_BYTES = 256
PARTS = OF_REPLICAS + "of/"  # before the name of a variable: the values of all replicas, along a first axis
OF_BOXES = OF_REPLICAS + "boxes/"  # before the name of an array: offset, shape and checksum of each box of a rank
_BY_BITS = {"bfloat16": np.dtype(np.uint16)}


def stored(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the dataset that stores arrays of this dtype.

    Examples
    --------
    >>> stored(np.dtype("float32"))
    dtype('float32')
    """
    return _BY_BITS.get(dtype.name, dtype)


def dtype_of(name: str, stored: np.dtype | None = None) -> np.dtype:
    """Return the dtype of an array by its name, and the dtype of the dataset that stores it, if it is known.

    Examples
    --------
    >>> dtype_of("float32", np.dtype(">f4"))
    dtype('float32')
    """
    if name in _BY_BITS:
        importlib.import_module("ml_dtypes")  # registers the name with NumPy
        return np.dtype(name)
    return (np.dtype(name) if stored is None else stored).newbyteorder("=")


def comparable(value: Any) -> Any:
    """Return an array with the bytes that every rank and every reader gets for its values, or the array itself.

    Bytes in the order of another machine would be read back swapped. x87's long double has 10 bytes of value in 16:
    what stands in the others differs between equal arrays.

    Examples
    --------
    >>> comparable(np.array([1.0], ">f8")).dtype
    dtype('float64')
    """
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    if value.dtype.char in "gG" and np.finfo(value.dtype).nmant == 63:
        value = value.copy(order="C")
        # Only the padding of a copy is set to zero, not the memory of the caller.
        value.reshape(-1).view(np.uint8).reshape(-1, np.dtype(np.longdouble).itemsize)[:, 10:] = 0
    return value
