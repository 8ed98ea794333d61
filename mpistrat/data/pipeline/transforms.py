"""The transforms of a dataset: what each does to the length and to the numbers of the elements.

A dataset is never run from its start. Each transform says which element of its input its element
``k`` is, in which iteration, so that any rank can read any rows of any batch, and only those.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np

from mpistrat.data.options import SHARD_HINT
from mpistrat.data.pipeline.permutation import Permutations
from mpistrat.data.rows.blocks import BlockOrder, Blocks
from mpistrat.data.rows.feistel import Feistel, round_keys

# Positions in the numbers that were asked for, their numbers in the input, the input's iteration.
Segment: TypeAlias = "tuple[Any, np.ndarray, int]"
Locate: TypeAlias = "Callable[[np.ndarray, int], Iterable[Segment]]"

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

    def locate(self, n: int | None, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
        """Where the elements ``ks`` of this iteration lie in the input."""
        return [(_ALL, ks, iteration)]

    def prepared(self, n: int | None, blocks: Blocks | None) -> Locate:
        """`locate` for an input of this length, whose elements are best read in these blocks."""
        return partial(self.locate, n)

    def without_numbers(self) -> str:
        """What must be equal for a state of the input to have a meaning: all but seeds and batch sizes."""
        return str(self)


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
    mode: str = "block"

    def length(self, n: int | None) -> int | None:
        if n is None and self.buffer_size is None:
            raise ValueError(
                "an endless dataset cannot be shuffled as a whole: call shuffle() before repeat(), "
                "or give shuffle(buffer_size=...)"
            )
        return n

    def prepared(self, n: int | None, blocks: Blocks | None) -> Locate:
        if n is None:
            assert self.buffer_size is not None
            return RunsShuffled(self, self.buffer_size)
        return ExactlyShuffled(self, n) if self.mode == "exact" else BlocksShuffled(self, n, blocks)

    def without_numbers(self) -> str:
        return f"shuffle({self.buffer_size}, reshuffle={self.reshuffle}, mode={self.mode!r})"

    def __str__(self) -> str:
        told = [f"seed={self.seed}"] * self.seeded + [f"mode={self.mode!r}"] * (self.mode != "block")
        return f"shuffle({', '.join(told)})"


class BlocksShuffled:
    """Blocks permuted, and then rows in windows of them; see `BlockOrder`."""

    def __init__(self, shuffle: Shuffle, n: int, blocks: Blocks | None):
        self.length = n
        self._shuffle = shuffle
        self._order = BlockOrder(n, blocks)

    def __call__(self, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
        return [(_ALL, self._order(ks, self._shuffle.seed, self._key(iteration)), iteration)]

    def spans(self, k: int, iteration: int) -> tuple[int, np.ndarray]:
        """Where the window of element ``k`` ends, and the runs of elements of the input in it."""
        return self._order.spans(k, self._shuffle.seed, self._key(iteration))

    def _key(self, iteration: int) -> int:
        return iteration if self._shuffle.reshuffle else 0


class ExactlyShuffled:
    """A uniform permutation, which is kept in memory."""

    def __init__(self, shuffle: Shuffle, n: int):
        self._shuffle, self._n = shuffle, n
        self._permutations = Permutations()

    def __call__(self, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
        key = iteration if self._shuffle.reshuffle else 0
        order = self._permutations(self._n, self._shuffle.seed, key)
        return [(_ALL, order[ks].astype(np.int64), iteration)]


class RunsShuffled:
    """Every run of as many elements permuted."""

    def __init__(self, shuffle: Shuffle, size: int):
        self._shuffle, self._size = shuffle, size

    def __call__(self, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
        keys = round_keys(self._shuffle.seed, iteration if self._shuffle.reshuffle else 0, "runs")
        run = ks // self._size
        start = run * self._size
        return [(_ALL, start + Feistel(self._size, keys)(ks - start, run), iteration)]


@dataclass(frozen=True)
class Repeat(Transform):
    """The input several times over, each time a new iteration of it; None for ever."""

    count: int | None

    def length(self, n: int | None) -> int | None:
        if n is None or n == 0 or self.count == 0:
            return 0 if self.count == 0 else n
        return None if self.count is None else n * self.count

    def turns(self, iteration: int) -> tuple[int, Iterable[int]]:
        """Which iteration of the input comes first, and the numbers to add to it."""
        if self.count is None:
            return iteration * _ITERATIONS_OF_ENDLESS, itertools.count()
        return iteration * self.count, range(self.count)

    def locate(self, n: int | None, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
        first, _ = self.turns(iteration)
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

    def locate(self, n: int | None, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
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

    def locate(self, n: int | None, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
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

    def without_numbers(self) -> str:
        return "batch"

    def __str__(self) -> str:
        return f"batch({self.size}{', drop_remainder=True' if self.drop_remainder else ''})"


def drawn_seeds(transforms: Iterable[Transform]) -> list[int]:
    """The seeds of those shuffles to which the program gave none."""
    return [each.seed for each in transforms if isinstance(each, Shuffle) and not each.seeded]


def with_drawn_seeds(transforms: Iterable[Transform], seeds: Iterable[int]) -> tuple[Transform, ...]:
    """The transforms with other seeds where the program gave none."""
    left = iter(seeds)
    return tuple(
        replace(each, seed=next(left, each.seed)) if isinstance(each, Shuffle) and not each.seeded else each
        for each in transforms
    )


def with_seeds(transforms: Iterable[Transform], seeds: Iterable[int]) -> tuple[Transform, ...]:
    """The transforms with these seeds, one for every shuffle."""
    left = iter(seeds)
    return tuple(replace(each, seed=next(left)) if isinstance(each, Shuffle) else each for each in transforms)


def length_of(n: int | None, transforms: Iterable[Transform]) -> int | None:
    """How many elements come out of a whole pipeline."""
    for transform in transforms:
        n = transform.length(n)
    return n


class Order:
    """Several transforms, none of them a batch, as one map of numbers."""

    def __init__(self, n: int | None, transforms: Iterable[Transform], blocks: Blocks | None = None):
        self._levels: list[Locate] = []
        for transform in transforms:
            after = transform.length(n)
            if transform.reorders:
                self._levels.append(transform.prepared(n, blocks))
                blocks = None if blocks is None or after is None else blocks.in_one_run(after)
            n = after
        self.length = n

    def locate(self, ks: np.ndarray, iteration: int, level: int = 0) -> list[Segment]:
        """Where elements lie in the input of the first transform, or of a later one that moves them."""
        segments: list[Segment] = [(np.arange(len(ks)), ks, iteration)]
        for locate in reversed(self._levels[level:]):
            segments = [
                (where[part], inner, inner_iteration)
                for where, numbers, each in segments
                for part, inner, inner_iteration in locate(numbers, each)
            ]
        return segments

    @property
    def windows(self) -> BlocksShuffled | None:
        """What permutes the elements in windows, if this is what is done to them first."""
        first = self._levels[0] if self._levels else None
        return first if isinstance(first, BlocksShuffled) else None


def _groups(keys: np.ndarray) -> Iterator[tuple[int, Any]]:
    if len(keys) and keys[0] == keys[-1] and (keys == keys[0]).all():
        yield int(keys[0]), _ALL
        return
    for key in np.unique(keys):
        yield int(key), np.flatnonzero(keys == key)
