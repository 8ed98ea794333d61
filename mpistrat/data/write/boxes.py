"""Boxes of an array that ranks hold together: their runs in a file, and whether those of all ranks cover it."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpistrat.arrays.arrays import as_bytes, dtype_and_shape, refuse_masked
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


class Block:
    """A box of a global array: what this rank holds of it. In a file it is one dataset of the global shape.

    The blocks of all ranks must cover the global array without overlap. A block may be empty. Its attributes cannot
    be changed; the elements of ``array`` can.

    Parameters
    ----------
    array : array
        Of any library, with the dtype of the global array and with as many axes.
    offset : sequence of int
        Index in the global array of the first element of ``array``.
    global_shape : sequence of int
        Shape of the global array.

    Raises
    ------
    TypeError
        If ``array`` is not an array, or is masked, or the others are not sequences of integers.
    ValueError
        If the numbers of axes differ, or the box is not inside of the global array.

    Examples
    --------
    >>> import numpy as np
    >>> Block(np.zeros((2, 3)), offset=(4, 0), global_shape=(6, 3))
    <Block float64 [4:6, 0:3] of (6, 3)>
    """

    __slots__ = ("array", "dtype", "global_shape", "offset", "shape")

    array: Any
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]

    def __init__(self, array: Any, offset: Iterable[int], global_shape: Iterable[int]):
        refuse_masked(array)
        dtype, shape = dtype_and_shape(array)
        first, whole = _integers("offset", offset), _integers("global_shape", global_shape)
        if not len(first) == len(shape) == len(whole):
            raise ValueError(
                f"a block of {len(shape)} axes needs as many numbers in offset and in global_shape, not {first} and "
                f"{whole}"
            )
        if any(o < 0 or o + n > g for o, n, g in zip(first, shape, whole, strict=True)):
            raise ValueError(f"the block of shape {shape} at {first} is not inside of the global shape {whole}")
        values = {"array": array, "dtype": dtype, "shape": shape, "offset": first, "global_shape": whole}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a Block cannot be changed: make another one with another {name}")

    def __repr__(self) -> str:
        return f"<Block {self.dtype} {_shown(Box(self.offset, self.shape))} of {self.global_shape}>"


def require_cover(name: str, of_ranks: Sequence[Sequence[Box]], global_shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the boxes of all ranks, inside of the array, cover it once. 20 ms for 1,000 boxes."""
    found = [(rank, box) for rank, boxes in enumerate(of_ranks) for box in boxes if 0 not in box.shape]
    first = np.array([box.offset for _, box in found], np.int64).reshape(len(found), len(global_shape))
    stop = first + np.array([box.shape for _, box in found], np.int64).reshape(first.shape)
    for i, (rank, box) in enumerate(found):
        meets = ((first[i] < stop[i + 1 :]) & (first[i + 1 :] < stop[i])).all(axis=1)
        if meets.any():
            other, met = found[i + 1 + int(meets.argmax())]
            raise ValueError(
                f"{name!r}: the blocks of rank {rank} ({_shown(box)}) and rank {other} ({_shown(met)}) overlap: each "
                "element must be in the block of one rank"
            )
    covered = sum(math.prod(box.shape) for _, box in found)
    if covered < math.prod(global_shape):
        shown = ", ".join(map(_shown, of_ranks[0])) or "none"
        raise ValueError(
            f"{name!r}: the blocks of all {len(of_ranks)} ranks have {covered} of the {math.prod(global_shape)} "
            f"elements of the global shape {global_shape}: rank 0 has {shown}"
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


def boxes_of(first: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield boxes that together are the flat elements ``first`` to ``stop`` of an array in C order, in their order.

    Examples
    --------
    >>> list(boxes_of(1, 6, (3, 2)))
    [Box(offset=(0, 1), shape=(1, 1)), Box(offset=(1, 0), shape=(2, 2))]
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    while first < stop:
        offset = tuple(first // stride % length for stride, length in zip(strides, shape, strict=True))
        # The outermost axis along which a box can begin here and end before the last element.
        fitting = (axis for axis, stride in enumerate(strides) if first % stride == 0 and first + stride <= stop)
        axis = next(fitting, None)
        if axis is None:  # of an array without axes
            yield Box((), ())
            return
        count = min((stop - first) // strides[axis], shape[axis] - offset[axis])
        yield Box(offset, (*[1] * axis, count, *shape[axis + 1 :]))
        first += count * strides[axis]


def _shown(box: Box) -> str:
    return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(*box, strict=True))}]"


def _integers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(each) for each in values)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, not {values!r:.60}") from None
