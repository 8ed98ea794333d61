"""What is in the file of a checkpoint: arrays by name, with checksums.

It is an HDF5 file, which any HDF5 program reads. Each array is a contiguous dataset, whose attribute ``checksums`` has
that of each piece of it; how many bytes a piece has is in the attribute ``checksum_bytes`` of the file. Both are
missing in files of earlier versions.

A checksum has 64 bits: the words of each 4 KiB are added up, and those sums once more, each times another odd number.
It tells bytes that are changed, missing, or elsewhere, as disks and copies make them; against forgers it is no help.
It takes a tenth of the time of a CRC-32, which would be a third of all that a save takes.
"""

from __future__ import annotations

import numpy as np

CHECKSUMS = "checksums"
PIECE_BYTES = "checksum_bytes"
DTYPE = "dtype"  # of a dataset: the name of a dtype that HDF5 has no word for, of which the bits are stored
_WORDS = 512
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


def checksum(data: memoryview) -> int:
    """Of a piece.

    Examples
    --------
    >>> checksum(memoryview(bytes([1] + 4095 * [0] + [1])))
    4
    """
    words = np.frombuffer(data, "<u8", len(data) // 8)
    pages = words[: len(words) // _WORDS * _WORDS].reshape(-1, _WORDS).sum(axis=1, dtype=np.uint64)
    rest = bytes(data[pages.size * 8 * _WORDS :])
    last = np.frombuffer(rest + bytes(-len(rest) % 8), "<u8").sum(dtype=np.uint64)
    sums = np.append(pages, last)
    return int((sums * np.arange(1, 2 * len(sums), 2, dtype=np.uint64)).sum(dtype=np.uint64))
