"""The transforms of a dataset: what each does to the length and to the numbers of the elements.

A dataset is never run from its start. Each transform says which element of its input its element
``k`` is, in which iteration, so that any rank can read any rows of any batch, and only those.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from mpistrat.data.options import SHARD_HINT
from mpistrat.data.permutation import Permutations

# Positions in the numbers that were asked for, their numbers in the input, the input's iteration.
Segment: TypeAlias = "tuple[Any, np.ndarray, int]"

_ALL = slice(None)
_ITERATIONS_OF_ENDLESS = 1 << 32


def integer(value: Any, what: str, least: int) -> int:
    """``value`` as an int of at least ``least``.

    Raises
    ------
    TypeError
        If it is no integer.
    ValueError
        If it is too small.
    """
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an integer, not {value!r}") from None
    if number < least:
        raise ValueError(f"{what} must be at least {least}, got {number}")
    return number


class Transform:
    """One step of a pipeline; its input has ``n`` elements, None for endless."""

    reorders: ClassVar[bool] = True

    def length(self, n: int | None) -> int | None:
        """How many elements come out of ``n``."""
        return n

    def locate(
        self, ks: np.ndarray, iteration: int, n: int | None, permutations: Permutations
    ) -> Iterable[Segment]:
        """Where the elements ``ks`` of this iteration lie in the input."""
        return [(_ALL, ks, iteration)]


@dataclass(frozen=True)
class Map(Transform):
    """Apply a function; elements stay where they are."""

    reorders: ClassVar[bool] = False

    fn: Callable[..., Any]

    def __str__(self) -> str:
        return "map"


@dataclass(frozen=True)
class Shuffle(Transform):
    """Permute the whole input, or, when it is endless, every run of ``buffer_size`` elements."""

    seed: int
    seeded: bool
    buffer_size: int | None = None
    reshuffle: bool = True

    def length(self, n: int | None) -> int | None:
        if n is None and self.buffer_size is None:
            raise ValueError(
                "an endless dataset cannot be shuffled as a whole: call shuffle() before repeat(), "
                "or give shuffle(buffer_size=...)"
            )
        return n

    def locate(
        self, ks: np.ndarray, iteration: int, n: int | None, permutations: Permutations
    ) -> Iterable[Segment]:
        key = iteration if self.reshuffle else 0
        if n is not None:
            return [(_ALL, permutations(n, self.seed, key)[ks].astype(np.int64), iteration)]
        size = self.buffer_size
        assert size is not None
        inner = np.empty_like(ks)
        for window, where in _groups(ks // size):
            start = window * size
            inner[where] = start + permutations(size, self.seed, key, window)[ks[where] - start]
        return [(_ALL, inner, iteration)]

    def __str__(self) -> str:
        return f"shuffle(seed={self.seed})" if self.seeded else "shuffle()"


@dataclass(frozen=True)
class Repeat(Transform):
    """The input several times over, each time a new iteration of it; None for ever."""

    count: int | None

    def length(self, n: int | None) -> int | None:
        if n is None or n == 0 or self.count == 0:
            return 0 if self.count == 0 else n
        return None if self.count is None else n * self.count

    def locate(
        self, ks: np.ndarray, iteration: int, n: int | None, permutations: Permutations
    ) -> Iterable[Segment]:
        first = iteration * (_ITERATIONS_OF_ENDLESS if self.count is None else self.count)
        if n is None:
            return [(_ALL, ks, first)]
        return [(where, ks[where] - turn * n, first + turn) for turn, where in _groups(ks // n)]

    def __str__(self) -> str:
        return "repeat()" if self.count is None else f"repeat({self.count})"


@dataclass(frozen=True)
class Take(Transform):
    """The first elements, -1 for all."""

    count: int

    def length(self, n: int | None) -> int | None:
        if self.count < 0:
            return n
        return self.count if n is None else min(n, self.count)

    def __str__(self) -> str:
        return f"take({self.count})"


@dataclass(frozen=True)
class Skip(Transform):
    """All but the first elements, -1 for none."""

    count: int

    def length(self, n: int | None) -> int | None:
        if self.count < 0:
            return 0
        return None if n is None else max(0, n - self.count)

    def locate(
        self, ks: np.ndarray, iteration: int, n: int | None, permutations: Permutations
    ) -> Iterable[Segment]:
        return [(_ALL, ks + self.count, iteration)]

    def __str__(self) -> str:
        return f"skip({self.count})"


@dataclass(frozen=True)
class Shard(Transform):
    """Every ``num_shards``-th element from ``index`` on."""

    num_shards: int
    index: int

    @property
    def is_hint(self) -> bool:
        """Whether the numbers are still to be put in by AutoShardPolicy.HINT."""
        return self.num_shards == SHARD_HINT

    def length(self, n: int | None) -> int | None:
        if self.is_hint:
            raise ValueError(
                "shard(SHARD_HINT, SHARD_HINT) only has a meaning in a distributed dataset whose "
                "auto_shard_policy is AutoShardPolicy.HINT: set it with with_options(), or give numbers"
            )
        return None if n is None else len(range(self.index, n, self.num_shards))

    def locate(
        self, ks: np.ndarray, iteration: int, n: int | None, permutations: Permutations
    ) -> Iterable[Segment]:
        return [(_ALL, ks * self.num_shards + self.index, iteration)]

    def __str__(self) -> str:
        return f"shard({self.num_shards}, {self.index})"


@dataclass(frozen=True)
class Batch(Transform):
    """Stack consecutive elements."""

    size: int
    drop_remainder: bool = False

    def length(self, n: int | None) -> int | None:
        if n is None:
            return None
        return n // self.size if self.drop_remainder else -(-n // self.size)

    def __str__(self) -> str:
        return f"batch({self.size}{', drop_remainder=True' if self.drop_remainder else ''})"


def length_of(n: int | None, transforms: Iterable[Transform]) -> int | None:
    """How many elements come out of a whole pipeline."""
    for transform in transforms:
        n = transform.length(n)
    return n


class Order:
    """Several transforms, none of them a batch, as one map of numbers."""

    def __init__(self, n: int | None, transforms: Iterable[Transform]):
        self._levels: list[tuple[Transform, int | None, Permutations]] = []
        for transform in transforms:
            after = transform.length(n)
            if transform.reorders:
                self._levels.append((transform, n, Permutations()))
            n = after
        self._levels.reverse()
        self.length = n

    def locate(self, ks: np.ndarray, iteration: int) -> list[Segment]:
        """Where elements lie in the input of the first transform."""
        segments: list[Segment] = [(np.arange(len(ks)), ks, iteration)]
        for transform, n, permutations in self._levels:
            segments = [
                (where[part], inner, inner_iteration)
                for where, numbers, each in segments
                for part, inner, inner_iteration in transform.locate(numbers, each, n, permutations)
            ]
        return segments


def _groups(keys: np.ndarray) -> Iterator[tuple[int, Any]]:
    if len(keys) and keys[0] == keys[-1] and (keys == keys[0]).all():
        yield int(keys[0]), _ALL
        return
    for key in np.unique(keys):
        yield int(key), np.flatnonzero(keys == key)
