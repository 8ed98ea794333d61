"""Partitioners: how many shards a variable is cut into."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np


class Partitioner:
    """A rule for the number of shards of a variable. Subclasses define ``__call__``.

    A strategy takes any other callable with the arguments ``shape`` and ``dtype``, too.

    Examples
    --------
    >>> class Halves(Partitioner):
    ...     def __call__(self, shape, dtype, axis=0):
    ...         return [2 if i == axis else 1 for i in range(len(shape))]
    >>> Halves()((8, 3), "float32")
    [2, 1]
    """

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of parts of each axis: 1 for all but ``axis``.

        Parameters
        ----------
        shape : sequence of int
            Shape of the variable.
        dtype : dtype
            Dtype of the variable, in any form that NumPy takes.
        axis : int
            Axis to cut. A negative number counts from the last axis.

        Raises
        ------
        ValueError
            If the shape has no such axis; a scalar has none.
        NotImplementedError
            In the base class.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")


class FixedShardsPartitioner(Partitioner):
    """A fixed number of shards, or one for each row if there are fewer rows.

    Parameters
    ----------
    num_shards : int

    Raises
    ------
    ValueError
        If ``num_shards`` is less than 1.
    TypeError
        If it is not an integer.

    Examples
    --------
    >>> FixedShardsPartitioner(3)((10, 2), "float32"), FixedShardsPartitioner(3)((2,), "float32")
    ([3, 1], [2])
    """

    def __init__(self, num_shards: int):
        self._num_shards = _at_least(1, "num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of parts of each axis. Arguments and errors as for `Partitioner`."""
        sizes, axis = _checked(shape, axis)
        return _parts(sizes, axis, min(self._num_shards, sizes[axis]))


class MinSizePartitioner(Partitioner):
    """As many shards as the bytes fill, and no more than ``max_shards``.

    The number is rounded up, so that a shard may be smaller than ``min_shard_bytes``.

    Parameters
    ----------
    min_shard_bytes : int
        Bytes of a shard.
    max_shards : int
        Largest number of shards.
    bytes_per_string : int
        Bytes that an element of a string dtype counts as.

    Raises
    ------
    ValueError
        If an argument is less than 1.
    TypeError
        If an argument is not an integer.

    Examples
    --------
    >>> MinSizePartitioner(min_shard_bytes=4 << 10, max_shards=8)((5000,), "float32")
    [5]
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16):
        self._min_shard_bytes = _at_least(1, "min_shard_bytes", min_shard_bytes)
        self._max_shards = _at_least(1, "max_shards", max_shards)
        self._bytes_per_string = _at_least(1, "bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of parts of each axis. Arguments and errors as for `Partitioner`."""
        sizes, axis = _checked(shape, axis)
        nbytes = math.prod(sizes) * _element_bytes(dtype, self._bytes_per_string)
        return _parts(sizes, axis, min(sizes[axis], self._max_shards, -(-nbytes // self._min_shard_bytes)))


class MaxSizePartitioner(Partitioner):
    """As few shards as possible without one that is larger than ``max_shard_bytes``.

    Shards have whole rows: one that is larger than ``max_shard_bytes`` is a shard of its own.

    Parameters
    ----------
    max_shard_bytes : int
        Largest number of bytes of a shard.
    max_shards : int, optional
        Largest number of shards; None or 0 for no limit.
    bytes_per_string : int
        Bytes that an element of a string dtype counts as.

    Raises
    ------
    ValueError
        If a number of bytes is less than 1, or ``max_shards`` is negative.
    TypeError
        If an argument is not an integer.

    Examples
    --------
    >>> MaxSizePartitioner(max_shard_bytes=1 << 20)((1000, 1000), "float32")
    [4, 1]
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16):
        self._max_shard_bytes = _at_least(1, "max_shard_bytes", max_shard_bytes)
        self._max_shards = 0 if max_shards is None else _at_least(0, "max_shards", max_shards)
        self._bytes_per_string = _at_least(1, "bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of parts of each axis. Arguments and errors as for `Partitioner`."""
        sizes, axis = _checked(shape, axis)
        if not math.prod(sizes):
            return _parts(sizes, axis, 1)
        row_bytes = math.prod(sizes) // sizes[axis] * _element_bytes(dtype, self._bytes_per_string)
        rows = max(1, self._max_shard_bytes // row_bytes)
        shards = -(-sizes[axis] // rows)
        return _parts(sizes, axis, min(shards, self._max_shards) if self._max_shards else shards)


def _at_least(least: int, name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be {least} or more, not {number}")
    return number


def _checked(shape: Sequence[int], axis: int) -> tuple[tuple[int, ...], int]:
    """Return the shape and the axis counted from 0."""
    sizes = tuple(_at_least(0, "a dimension of the shape", size) for size in shape)
    place = operator.index(axis)
    if not -len(sizes) <= place < len(sizes):
        raise ValueError(f"a variable of shape {sizes} has no axis {axis} to cut")
    return sizes, place % len(sizes)


def _parts(sizes: tuple[int, ...], axis: int, shards: int) -> list[int]:
    if not math.prod(sizes):
        shards = 1
    return [shards if each == axis else 1 for each in range(len(sizes))]


def _element_bytes(dtype: Any, bytes_per_string: int) -> int:
    found = np.dtype(dtype)
    return bytes_per_string if found.kind in "SUOT" else found.itemsize
