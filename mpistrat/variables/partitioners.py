"""Partitioners: how many shards a variable is cut into, which rows each has, and what an index or a slice touches."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np


class RowsOfShard(NamedTuple):
    """The indices that lie on one shard: their positions among all indices, and their rows in the shard."""

    shard: int
    positions: np.ndarray
    rows: np.ndarray


class Selection(NamedTuple):
    """The rows of each shard that an index of the whole array needs.

    ``parts`` has shards and slices of rows, in the order of the result: index ``rest`` of their concatenation.
    """

    parts: tuple[tuple[int, slice], ...]
    rest: Any


@dataclass(frozen=True)
class Sharding:
    """The division of rows among shards, as even as possible: the first shards have one row more than the others.

    >>> sharding = Sharding(rows=8, shards=3)
    >>> sharding.lengths, sharding.offsets
    ((3, 3, 2), (0, 3, 6))
    """

    rows: int
    shards: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", max(1, min(self.shards, self.rows)))  # frozen; no shard is empty

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of rows of each shard."""
        least, more = divmod(self.rows, self.shards)
        return tuple(least + (shard < more) for shard in range(self.shards))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First row of each shard."""
        least, more = divmod(self.rows, self.shards)
        return tuple(least * shard + min(shard, more) for shard in range(self.shards))

    def cut(self, array: Any) -> list[Any]:
        """Return the rows of each shard, as views of the array. Raise ValueError if it has another number of rows."""
        if not array.shape or array.shape[0] != self.rows:
            raise ValueError(f"an array of shape {array.shape} cannot be cut into shards of {self.rows} rows")
        return [array[slice(*self.bounds(shard))] for shard in range(self.shards)]

    def bounds(self, shard: int) -> tuple[int, int]:
        """Return the first row of a shard, and the row after its last one."""
        return self.offsets[shard], self.offsets[shard] + self.lengths[shard]

    def shard_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the shard of each row."""
        return np.searchsorted(self.offsets, indices, side="right") - 1

    def by_shard(self, indices: np.ndarray) -> list[RowsOfShard]:
        """Return the shards that hold these rows. On a shard, indices keep their order and are repeated as given.

        Raise ValueError if an index is negative or too large.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < self.rows:
            raise ValueError(
                f"the array has {self.rows} rows: indices from {indices.min()} to {indices.max()} do not fit"
            )
        shards = self.shard_of(indices)
        # Stable: of equal indices the last row must stay the last.
        order = np.argsort(shards, kind="stable")
        ends = np.searchsorted(shards[order], np.arange(self.shards + 1))
        by_shard = []
        for shard, (start, end) in enumerate(itertools.pairwise(ends)):
            if start < end:
                positions = order[start:end]
                by_shard.append(RowsOfShard(shard, positions, indices[positions] - self.offsets[shard]))
        return by_shard

    def select(self, key: Any) -> Selection:
        """Return the rows of each shard that ``array[key]`` needs. At least one part is named.

        An integer or a slice of the first axis needs its own rows only, other indices, such as masks, all rows. Raise
        IndexError if an integer is out of range, and ValueError if the step of a slice is 0.

        >>> Sharding(8, 3).select(slice(2, 7, 2)).parts
        ((0, slice(2, 3, 2)), (1, slice(1, 2, 2)), (2, slice(0, 1, 2)))
        """
        first, *others = key if isinstance(key, tuple) and key else (key,)
        # A bool is a mask for NumPy, and not the index 0 or 1.
        if isinstance(first, (bool, np.bool_)) or not isinstance(first, (int, np.integer, slice)):
            return Selection(tuple((shard, slice(0, n, 1)) for shard, n in enumerate(self.lengths)), key)
        if isinstance(first, slice):
            return Selection(self._parts(range(self.rows)[first]), (slice(None), *others))
        if not -self.rows <= first < self.rows:
            raise IndexError(f"index {first} is out of range: the array has {self.rows} rows")
        row = int(first) % self.rows
        return Selection(self._parts(range(row, row + 1)), (0, *others))

    def _parts(self, rows: range) -> tuple[tuple[int, slice], ...]:
        """Return the slices of the shards that hold an arithmetic sequence of rows, in its order."""
        parts = []
        for shard in range(self.shards):
            start, end = self.bounds(shard)
            inside = rows[_positions_in(rows, start, end)]
            if inside:
                # A slice that goes down to row 0 has no stop: -1 would count from the end.
                stop = inside[-1] - start + (1 if rows.step > 0 else -1)
                parts.append((shard, slice(inside[0] - start, stop if stop >= 0 else None, rows.step)))
        if rows.step < 0:
            parts.reverse()
        return tuple(parts) or ((0, slice(0, 0, 1)),)


def _positions_in(rows: range, start: int, end: int) -> slice:
    """Return the positions in a sequence of rows of the rows from ``start`` to ``end``."""
    step, first = rows.step, rows.start
    lower, upper = (start, end) if step > 0 else (end - 1, start - 1)
    return slice(max(0, -(-(lower - first) // step)), max(0, -(-(upper - first) // step)))


def shards_wanted(partitioner: Callable[..., Sequence[int]], shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the number of shards that a partitioner gives a variable. Scalars are never cut.

    Raise ValueError unless it returns a number for each axis. Only the first may exceed 1.
    """
    if not shape:
        return 1
    answer = [int(number) for number in partitioner(shape, dtype)]
    if len(answer) != len(shape) or answer[0] < 1 or math.prod(answer[1:]) != 1:
        raise ValueError(
            f"the partitioner returns {answer} for a variable of shape {shape}: it must return a number for each axis, "
            "the first at least 1 and the others 1"
        )
    return Sharding(shape[0], answer[0]).shards


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
    number = operator.index(axis)
    if not -len(sizes) <= number < len(sizes):
        raise ValueError(f"a variable of shape {sizes} has no axis {axis} to cut")
    return sizes, number % len(sizes)


def _parts(sizes: tuple[int, ...], axis: int, shards: int) -> list[int]:
    if not math.prod(sizes):
        shards = 1
    return [shards if other == axis else 1 for other in range(len(sizes))]


def _element_bytes(dtype: Any, bytes_per_string: int) -> int:
    element = np.dtype(dtype)
    return bytes_per_string if element.kind in "SUOT" else element.itemsize
