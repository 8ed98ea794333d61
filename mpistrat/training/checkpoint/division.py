"""The division of the arrays of a new file over the ranks that write it.

All ranks compute it alike. Without h5py, whose import takes longer than the rest of a program that does not save.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpistrat.data.write.boxes import Box

_PIECE = 4 << 20
_MOST_PIECES = 4096  # of an array: HDF5 has room for 64 KiB in an attribute
_SMALL = 4096  # bytes: several such arrays lie in one page, which only one rank writes


class NewArray(NamedTuple):
    """An array of a new file. All ranks write it, in pieces, unless one is its ``owner``, or each has its own boxes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    owner: int | None = None
    boxes: tuple[tuple[Box, ...], ...] = ()

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


class RankPart(NamedTuple):
    """What one rank writes of an array: whole pieces of its bytes, or a box."""

    name: str
    start: int
    stop: int
    box: Box | None = None

    def pieces(self, piece: int) -> int:
        """Return how many checksums it has."""
        return 1 if self.box is not None else max(1, -(-(self.stop - self.start) // piece))


def piece_of(arrays: Mapping[str, NewArray]) -> int:
    """Return how many bytes have a checksum of their own."""
    piece = _PIECE
    largest = max((array.nbytes for array in arrays.values() if not array.boxes), default=0)
    while piece * _MOST_PIECES < largest:
        piece *= 2
    return piece


def divided(arrays: Mapping[str, NewArray], writers: Sequence[int], ranks: int) -> dict[int, list[RankPart]]:
    """Return what each of the ranks writes. What has no owner is divided over ``writers``, in consecutive pieces."""
    shares: dict[int, list[RankPart]] = {rank: [] for rank in range(ranks)}
    piece, before = piece_of(arrays), 0
    total = sum(array.nbytes for array in arrays.values() if array.owner is None and not array.boxes)
    for name, array in arrays.items():
        nbytes = array.nbytes
        if array.boxes:
            for rank, boxes in enumerate(array.boxes):
                slabs = itertools.chain.from_iterable(_slabs(box, array.dtype.itemsize, piece) for box in boxes)
                shares[rank] += [RankPart(name, 0, 0, each) for each in slabs]
        elif array.owner is not None or nbytes < _SMALL:
            shares[writers[0] if array.owner is None else array.owner].append(RankPart(name, 0, nbytes))
        else:
            of = [writers[(before + start) * len(writers) // total] for start in range(0, nbytes, piece)]
            for rank in dict.fromkeys(of):
                first, count = of.index(rank), of.count(rank)
                shares[rank].append(RankPart(name, first * piece, min((first + count) * piece, nbytes)))
        before += nbytes * (array.owner is None and not array.boxes)
    return shares


def _slabs(box: Box, itemsize: int, piece: int) -> Iterator[Box]:
    """Yield a box in parts of about the bytes of a piece, which are rows of it and have a checksum each."""
    if not box.shape:
        yield box
        return
    length, *inner = box.shape
    rows = max(1, piece // max(1, itemsize * math.prod(inner)))
    for first in range(0, 0 if 0 in box.shape else length, rows):
        yield Box((box.offset[0] + first, *box.offset[1:]), (min(rows, length - first), *inner))
