"""Blocks: what each rank holds of an array that is one dataset of a file, and the boxes of flat elements."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import numpy as np

from mpistrat.arrays.arrays import dtype_and_shape, refuse_masked
from mpistrat.storage.layout import Box


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
        return f"<Block {self.dtype} {Box(self.offset, self.shape)} of {self.global_shape}>"


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


def _integers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, not {values!r:.60}") from None
