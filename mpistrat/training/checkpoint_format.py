"""What is in the file of a checkpoint: arrays by name, with checksums.

It is an HDF5 file, which any HDF5 program reads. Each array is a contiguous dataset, whose attribute ``crc32`` has the
CRC-32 of each piece of it; how many bytes a piece has is in the attribute ``crc32_bytes`` of the file. Both are
missing in files of earlier versions.
"""

from __future__ import annotations

import numpy as np

CHECKSUMS = "crc32"
PIECE_BYTES = "crc32_bytes"
DTYPE = "dtype"  # of a dataset: the name of a dtype that HDF5 has no word for, of which the bits are stored
_BY_BITS = {"bfloat16": np.dtype(np.uint16)}


def stored(dtype: np.dtype) -> np.dtype:
    """The dtype of the dataset in which arrays of a dtype are stored.

    Examples
    --------
    >>> stored(np.dtype("float32"))
    dtype('float32')
    """
    return _BY_BITS.get(dtype.name, dtype)


def as_bytes(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array that has any.

    Examples
    --------
    >>> len(as_bytes(np.zeros((2, 3))))
    48
    """
    return array.reshape(-1).view(np.uint8).data
