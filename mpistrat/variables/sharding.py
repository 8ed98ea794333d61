"""The division of an array's rows among shards: which rows are where, and what an index or a slice touches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np


class RowsOfShard(NamedTuple):
    """The part of some indices that lies on one shard: their places among all, and the rows of the shard."""

    shard: int
    places: np.ndarray
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
        object.__setattr__(self, "shards", max(1, min(self.shards, self.rows)))

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
        order = np.argsort(shards, kind="stable")
        ends = np.searchsorted(shards[order], np.arange(self.shards + 1))
        found = []
        for shard, (start, end) in enumerate(itertools.pairwise(ends)):
            if start < end:
                places = order[start:end]
                found.append(RowsOfShard(shard, places, indices[places] - self.offsets[shard]))
        return found

    def select(self, key: Any) -> Selection:
        """Return the rows of each shard that ``array[key]`` needs. At least one part is named.

        An integer or a slice of the first axis needs its own rows only, other indices, such as masks, all rows. Raise
        IndexError if an integer is out of range, and ValueError if the step of a slice is 0.

        >>> Sharding(8, 3).select(slice(2, 7, 2)).parts
        ((0, slice(2, 3, 2)), (1, slice(1, 2, 2)), (2, slice(0, 1, 2)))
        """
        first, *others = key if isinstance(key, tuple) and key else (key,)
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
            inside = rows[_places_below(rows, start, end)]
            if inside:
                stop = inside[-1] - start + (1 if rows.step > 0 else -1)
                parts.append((shard, slice(inside[0] - start, stop if stop >= 0 else None, rows.step)))
        if rows.step < 0:
            parts.reverse()
        return tuple(parts) or ((0, slice(0, 0, 1)),)


def _places_below(rows: range, start: int, end: int) -> slice:
    """Return the places of a sequence of rows that lie from ``start`` to ``end``."""
    step, first = rows.step, rows.start
    lower, upper = (start, end) if step > 0 else (end - 1, start - 1)
    return slice(max(0, -(-(lower - first) // step)), max(0, -(-(upper - first) // step)))


def shards_wanted(partitioner: Callable[..., Sequence[int]], shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the number of shards that a partitioner gives a variable. Scalars are never cut.

    Raise ValueError if it does not return a number for each axis, of which only the first may exceed 1.
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
