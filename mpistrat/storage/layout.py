"""How arrays lie in a file that ranks write together: boxes, their bytes, and pieces with checksums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.process.files import read_all, write_all
from mpistrat.verify.digest import digest


class Box(NamedTuple):
    """A part of an array: the index of its first element, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(*self, strict=True))}]"

    def common(self, other: Box) -> Box:
        """Return what two boxes of an array have in common, which may be empty."""
        low = tuple(map(max, self.offset, other.offset))
        high = (min(o + n, i + m) for o, n, i, m in zip(*self, *other, strict=True))
        return Box(low, tuple(max(0, stop - start) for start, stop in zip(low, high, strict=True)))

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Return the index of this box in an array that begins at ``origin``."""
        return tuple(slice(o - at, o - at + n) for o, n, at in zip(*self, origin, strict=True))


def require_cover(name: str, of_ranks: Sequence[Sequence[Box]], global_shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the boxes of all ranks, inside of the array, cover it once. 20 ms for 1,000 boxes."""
    nonempty = [(rank, box) for rank, boxes in enumerate(of_ranks) for box in boxes if 0 not in box.shape]
    first = np.array([box.offset for _, box in nonempty], np.int64).reshape(len(nonempty), len(global_shape))
    stop = first + np.array([box.shape for _, box in nonempty], np.int64).reshape(first.shape)
    for i, (rank, box) in enumerate(nonempty):
        meets = ((first[i] < stop[i + 1 :]) & (first[i + 1 :] < stop[i])).all(axis=1)
        if meets.any():
            other, met = nonempty[i + 1 + int(meets.argmax())]
            raise ValueError(
                f"{name!r}: the blocks of rank {rank} ({box}) and rank {other} ({met}) overlap: each "
                "element must be in the block of one rank"
            )
    # Without overlap, boxes with as many elements as the array cover it.
    covered = sum(math.prod(box.shape) for _, box in nonempty)
    if covered < math.prod(global_shape):
        shown = ", ".join(map(str, of_ranks[0])) or "none"
        raise ValueError(
            f"{name!r}: the blocks of all {len(of_ranks)} ranks have {covered} of the {math.prod(global_shape)} "
            f"elements of the global shape {global_shape}: rank 0 has {shown}"
        )


def write_box(
    descriptor: int, array: np.ndarray, offset: Sequence[int], global_shape: Sequence[int], start_of_dataset: int
) -> None:
    """Write an array as a box of a dataset of its dtype that begins at ``start_of_dataset``, one call for each run."""
    count, starts = runs(offset, array.shape, global_shape)
    data, size = as_bytes(np.ascontiguousarray(array)).data, array.itemsize
    for i, start in enumerate(starts.tolist()):
        write_all(descriptor, data[i * count * size : (i + 1) * count * size], start_of_dataset + start * size)


def read_box(
    descriptor: int, array: np.ndarray, offset: Sequence[int], global_shape: Sequence[int], start_of_dataset: int
) -> bool:
    """Fill a contiguous array from a box, as `write_box` writes it. Return False if the file ends before."""
    count, starts = runs(offset, array.shape, global_shape)
    data, size = as_bytes(array).data, array.itemsize
    return all(
        read_all(descriptor, data[i * count * size : (i + 1) * count * size], start_of_dataset + start * size)
        for i, start in enumerate(starts.tolist())
    )


def runs(offset: Sequence[int], shape: Sequence[int], global_shape: Sequence[int]) -> tuple[int, np.ndarray]:
    """Return how many elements of a box follow each other in the file, and where each such run begins there."""
    if 0 in shape:
        return 0, np.empty(0, np.int64)
    if len(shape) == 1:  # 2 us less for each piece of a checkpoint
        return shape[0], np.array(offset, np.int64)
    strides = [math.prod(global_shape[axis + 1 :]) for axis in range(len(shape))]
    start = sum(o * stride for o, stride in zip(offset, strides, strict=True))
    outer = len(shape)  # axes before it are not within a run
    while outer and (outer == len(shape) or shape[outer] == global_shape[outer]):
        outer -= 1
    starts = np.array([start], np.int64)
    for axis in range(outer):
        starts = np.add.outer(starts, np.arange(shape[axis], dtype=np.int64) * strides[axis]).reshape(-1)
    return math.prod(shape[outer:]), starts


def checksum(data: memoryview, name: str) -> int:
    """Return the checksum of a piece of the variable ``name``.

    Examples
    --------
    >>> checksum(memoryview(b"ab"), "v") == checksum(memoryview(b"ba"), "v")
    False
    >>> checksum(memoryview(b"ab"), "v") == checksum(memoryview(b"ab"), "w")
    False
    """
    return digest(data, digest(name.encode()))


# --- the division of the arrays of a new file over the ranks that write it -------------------------------

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
        """The size of the values in the file, in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


class RankPart(NamedTuple):
    """A part of an array with a checksum of its own, which one rank writes: a piece of its bytes, or a box."""

    name: str
    start: int
    stop: int
    box: Box | None = None


def piece_of(arrays: Mapping[str, NewArray]) -> int:
    """Return the bytes per checksum: more for an array with too many pieces."""
    piece = _PIECE
    largest = max((array.nbytes for array in arrays.values() if not array.boxes), default=0)
    while piece * _MOST_PIECES < largest:
        piece *= 2
    return piece


def parts_of_ranks(arrays: Mapping[str, NewArray], writers: Sequence[int], ranks: int) -> dict[int, list[RankPart]]:
    """Return the parts that each rank writes. Arrays without owner are divided over ``writers``, in runs of pieces."""
    shares: dict[int, list[RankPart]] = {rank: [] for rank in range(ranks)}
    piece, before = piece_of(arrays), 0
    total = sum(array.nbytes for array in arrays.values() if array.owner is None and not array.boxes)
    for name, array in arrays.items():
        nbytes = array.nbytes
        for of_rank, boxes in zip(shares.values(), array.boxes, strict=False):
            slabs = itertools.chain.from_iterable(_slabs(box, array.dtype.itemsize, piece) for box in boxes)
            of_rank += [RankPart(name, 0, 0, slab) for slab in slabs]
        for start in () if array.boxes else range(0, max(1, nbytes), piece):
            rank = array.owner
            if rank is None:
                # By its position in all bytes, so that a rank writes a run of arrays and as many bytes as the others.
                rank = writers[0 if nbytes < _SMALL else (before + start) * len(writers) // total]
            shares[rank].append(RankPart(name, start, min(start + piece, nbytes)))
        before += nbytes * (array.owner is None and not array.boxes)
    return shares


def _slabs(box: Box, itemsize: int, piece: int) -> Iterator[Box]:
    """Yield a box in slabs of rows, each of about the bytes of a piece, with a checksum of its own."""
    if not box.shape:
        yield box
        return
    length, *inner = box.shape
    rows = max(1, piece // max(1, itemsize * math.prod(inner)))
    for first in range(0, 0 if 0 in box.shape else length, rows):
        yield Box((box.offset[0] + first, *box.offset[1:]), (min(rows, length - first), *inner))
