"""The transforms of a dataset: the length of the output, and the number in the input of each element.

A dataset is not run from its start. Each transform maps the number ``k`` of an output element, and its
iteration, to the number and iteration of an input element. So any rank can read any rows of any batch alone.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np

from mpistrat import nest
from mpistrat.data.options import SHARD_HINT
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.blocks import BlockOrder, Blocks
from mpistrat.data.rows.lanes import LaneOrder, Lanes
from mpistrat.data.rows.permutation import Feistel, permutation, round_keys
from mpistrat.data.rows.spec import ArraySpec
from mpistrat.process.cache import Cache
from mpistrat.runtime.topology import Topology

# Positions in the array of requested numbers, their numbers in the input, the iteration of the input.
Segment: TypeAlias = "tuple[Any, np.ndarray, int]"
Locate: TypeAlias = "Callable[[np.ndarray, int], Iterable[Segment]]"
# Maps the number of an iteration to its elements, of a dataset that is read in order.
Open: TypeAlias = "Callable[[int], Iterator[Any]]"

_ALL = slice(None)
_ITERATIONS_OF_ENDLESS = 1 << 32  # of the input in one iteration of an endless repeat()


def integer(value: Any, what: str, least: int) -> int:
    """Return ``value`` as an int. Raise TypeError if it is not one, and ValueError if it is less than ``least``."""
    try:
        # operator.index takes True as 1.
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an integer, not {value!r}") from None
    if number < least:
        raise ValueError(f"{what} must be at least {least}, got {number}")
    return number


class Transform:
    """One step of a pipeline. Its input has ``n`` elements; None means endless."""

    reorders: ClassVar[bool] = True

    def length(self, n: int | None) -> int | None:
        """Return the number of output elements for ``n`` input elements."""
        return n

    def locate(self, n: int | None, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
        """Return where the elements ``ks`` of an iteration lie in the input."""
        return [(_ALL, ks, iteration)]

    def prepared(self, n: int | None, blocks: Blocks | None) -> Locate:
        """Return `locate` for an input of ``n`` elements, which are best read in ``blocks``."""
        return partial(self.locate, n)

    def blocks_after(self, n: int | None, blocks: Blocks) -> Blocks | None:
        """Return which output elements are best read together, from the blocks of ``n`` input elements."""
        after = self.length(n)
        return None if after is None else blocks.in_one_run(after)

    def agree(self, ranks: Topology) -> None:
        """Read what the transform depends on, together with the other ranks. Collective."""
        return

    def streamed(self, open_input: Open, iteration: int) -> Iterator[Any]:
        """Return the output elements of an iteration. ``map`` is applied later."""
        return open_input(iteration)

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({', '.join(map(str, vars(self).values()))})"

    def without_numbers(self) -> str:
        """Return the transform as text without seed and batch size: what a state of the input must have equal."""
        return str(self)


@dataclass(frozen=True)
class Map(Transform):
    """The transform that applies a function. The order of the elements stays."""

    reorders: ClassVar[bool] = False

    fn: Callable[..., Any]
    calls: int = 1
    """How many calls for single rows run at the same time."""
    seed: int | None = None
    """The seed of the generator that each call gets, None for none."""

    workers: Any = None
    """The processes that call the function for single rows, None for this one."""

    @property
    def is_by_workers(self) -> bool:
        """Whether processes call the function, however long it takes."""
        return self.workers is not None and not self.workers.chooses

    @property
    def at_once(self) -> int:
        """How many rows are best mapped together if there is no batch."""
        return self.calls if self.workers is None else 4 * int(self.workers.count)

    def __str__(self) -> str:
        return "map" if self.seed is None else f"map(seed={self.seed})"


@dataclass(frozen=True)
class Seeded(Transform):
    """A transform with another random order in each epoch. ``seeded`` says whether the program gave the seed."""

    seed: int
    seeded: bool

    @property
    def by_row(self) -> bool:
        """Whether rows are taken one by one, from all over the input."""
        return False


@dataclass(frozen=True)
class Shuffle(Seeded):
    """The transform that permutes the whole input, or, of an endless one, every run of ``buffer_size``."""

    buffer_size: int | None = None
    reshuffle: bool = True
    mode: str = "block"
    lanes: Lanes | None = None
    """The lanes that keep files apart, of a distributed dataset."""

    @property
    def by_row(self) -> bool:
        return self.mode == "exact"

    def length(self, n: int | None) -> int | None:
        if n is None and self.buffer_size is None:
            raise ValueError(
                "an endless dataset cannot be shuffled as a whole: call shuffle() before repeat(), or give buffer_size"
            )
        return n

    def prepared(self, n: int | None, blocks: Blocks | None) -> Locate:
        if n is None:
            assert self.buffer_size is not None
            return partial(self._in_runs, self.buffer_size)
        if self.lanes is not None and blocks is not None:
            return partial(self._in_lanes, LaneOrder(blocks, self.lanes))
        if self.mode == "block":
            return BlocksShuffled(self, n, blocks)
        return partial(self._exactly, n, Cache[int, np.ndarray](2))  # a batch may lie across two epochs

    def _exactly(self, n: int, kept: Cache[int, np.ndarray], ks: np.ndarray, iteration: int) -> Iterable[Segment]:
        """Permute ``n`` elements uniformly. The permutation is kept in memory."""
        key = self.key(iteration)
        order = kept[key] if key in kept else kept.keep(key, permutation(n, self.seed, key))
        # The permutation is int32 below 2**31 elements, in which later products of row numbers would overflow.
        return [(_ALL, order[ks].astype(np.int64), iteration)]

    def _in_lanes(self, order: LaneOrder, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
        """Permute the elements of files, in lanes."""
        return [(_ALL, order(ks, self.seed, self.key(iteration)), iteration)]

    def _in_runs(self, size: int, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
        """Permute every run of ``size`` elements."""
        run = ks // size
        start = run * size
        # The number of the run is the tweak: one set of keys permutes each run in another way.
        permuted = Feistel(size, round_keys(self.seed, self.key(iteration), "runs"))
        return [(_ALL, start + permuted(ks - start, run), iteration)]

    def streamed(self, open_input: Open, iteration: int) -> Iterator[Any]:
        if self.buffer_size is None:
            raise ValueError("a dataset of unknown length cannot be shuffled as a whole: give shuffle(buffer_size=...)")
        stream = open_input(iteration)
        for number in itertools.count():
            run = list(itertools.islice(stream, self.buffer_size))
            if not run:
                return
            # Each run is shuffled as a dataset of its length, with its own key.
            locate = self.prepared(len(run), None)
            for _, order, _ in locate(np.arange(len(run)), (iteration << 32) + number if self.reshuffle else number):
                yield from (run[k] for k in order.tolist())

    def key(self, iteration: int) -> int:
        """Return the number on which the order of an iteration depends."""
        return iteration if self.reshuffle else 0

    def without_numbers(self) -> str:
        return f"shuffle({self.buffer_size}, reshuffle={self.reshuffle}, mode={self.mode!r})"

    def __str__(self) -> str:
        arguments = [f"seed={self.seed}"] * self.seeded + [f"mode={self.mode!r}"] * (self.mode != "block")
        return f"shuffle({', '.join(arguments)})"


class BlocksShuffled:
    """A permutation of blocks, then of the rows in windows of blocks; see `BlockOrder`."""

    def __init__(self, shuffle: Shuffle, n: int, blocks: Blocks | None):
        self.length = n
        self._shuffle = shuffle
        self._order = BlockOrder(n, blocks)

    def __call__(self, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
        return [(_ALL, self._order(ks, self._shuffle.seed, self._shuffle.key(iteration)), iteration)]

    def spans(self, k: int, iteration: int) -> tuple[int, np.ndarray]:
        """Return where the window of element ``k`` ends, and the runs of input elements in it."""
        return self._order.spans(k, self._shuffle.seed, self._shuffle.key(iteration))


@dataclass(frozen=True)
class Repeat(Transform):
    """The transform that repeats the input ``count`` times, each time as a new iteration; None means endless."""

    count: int | None

    def length(self, n: int | None) -> int | None:
        # No rows stay no rows, also when they are repeated without end.
        if n is None or n == 0 or self.count == 0:
            return 0 if self.count == 0 else n
        return None if self.count is None else n * self.count

    def turns(self, iteration: int) -> tuple[int, Iterable[int]]:
        """Return the first iteration of the input, and the numbers to add to it."""
        if self.count is None:
            # Repetitions of all epochs are numbered together, so that no two of them have one order.
            return iteration * _ITERATIONS_OF_ENDLESS, itertools.count()
        return iteration * self.count, range(self.count)

    def locate(self, n: int | None, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
        first, _ = self.turns(iteration)
        if n is None:
            return [(_ALL, ks, first)]
        return [(where, ks[where] - turn * n, first + turn) for turn, where in _groups(ks // n)]

    def streamed(self, open_input: Open, iteration: int) -> Iterator[Any]:
        first, turns = self.turns(iteration)
        for turn in turns:
            empty = True
            for element in open_input(first + turn):
                empty = False
                yield element
            # Otherwise an endless repeat() of nothing would never return.
            if empty:
                return

    def __str__(self) -> str:
        return "repeat()" if self.count is None else f"repeat({self.count})"


@dataclass(frozen=True)
class Take(Transform):
    """The transform that keeps the first elements, -1 for all."""

    count: int

    def length(self, n: int | None) -> int | None:
        if self.count < 0:
            return n
        return self.count if n is None else min(n, self.count)

    def streamed(self, open_input: Open, iteration: int) -> Iterator[Any]:
        return itertools.islice(open_input(iteration), None if self.count < 0 else self.count)


@dataclass(frozen=True)
class Skip(Transform):
    """The transform that leaves out the first elements, -1 for all."""

    count: int

    def length(self, n: int | None) -> int | None:
        if self.count < 0:
            return 0
        return None if n is None else max(0, n - self.count)

    def locate(self, n: int | None, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
        return [(_ALL, ks + self.count, iteration)]

    def streamed(self, open_input: Open, iteration: int) -> Iterator[Any]:
        return iter(()) if self.count < 0 else itertools.islice(open_input(iteration), self.count, None)


@dataclass(frozen=True)
class Shard(Transform):
    """The transform that keeps every ``num_shards``-th element from ``index`` on."""

    num_shards: int
    index: int

    @property
    def is_hint(self) -> bool:
        """Whether AutoShardPolicy.HINT has yet to fill in the numbers."""
        return self.num_shards == SHARD_HINT

    def length(self, n: int | None) -> int | None:
        if self.is_hint:
            raise ValueError(
                "shard(SHARD_HINT, SHARD_HINT) has a meaning only in a distributed dataset whose "
                "auto_shard_policy is AutoShardPolicy.HINT: set it with with_options(), or give numbers"
            )
        return None if n is None else len(range(self.index, n, self.num_shards))

    def locate(self, n: int | None, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
        return [(_ALL, ks * self.num_shards + self.index, iteration)]

    def streamed(self, open_input: Open, iteration: int) -> Iterator[Any]:
        self.length(None)  # raises for a hint that nothing has filled in
        return itertools.islice(open_input(iteration), self.index, None, self.num_shards)


@dataclass(frozen=True)
class Batch(Transform):
    """The transform that stacks consecutive elements."""

    stacks_arrays: ClassVar[bool] = True
    """Whether a batch of rows that a source stacked is these arrays."""
    consecutive: ClassVar[bool] = True
    """Whether a batch is the next ``size`` rows."""

    size: int
    drop_remainder: bool = False

    def length(self, n: int | None) -> int | None:
        if n is None:
            return None
        return n // self.size if self.drop_remainder else -(-n // self.size)

    def streamed(self, open_input: Open, iteration: int) -> Iterator[Any]:
        stream = open_input(iteration)
        while rows := list(itertools.islice(stream, self.size)):
            if len(rows) == self.size or not self.drop_remainder:
                yield rows

    def stack(self, rows: Sequence[Any], dtypes: Sequence[np.dtype] | None = None) -> Any:
        """Return rows as one batch, with these dtypes of its columns."""
        return elements.stack(rows, dtypes)

    def spec(self, row: Any, size: int | None) -> Any:
        """Return the specs of a batch, from the specs of a row."""
        return spec.stacked(row, size)

    def without_numbers(self) -> str:
        return "batch"

    def __str__(self) -> str:
        return f"batch({self.size}{', drop_remainder=True' if self.drop_remainder else ''})"


def before_batch(transforms: Sequence[Transform]) -> Sequence[Transform]:
    """Return the transforms of single rows."""
    return [*itertools.takewhile(lambda transform: not isinstance(transform, Batch), transforms)]


def length_of(n: int | None, transforms: Iterable[Transform]) -> int | None:
    """Return the number of output elements of a chain of transforms."""
    for transform in transforms:
        n = transform.length(n)
    return n


class Order:
    """The composition of transforms other than batches: one map from output to input numbers."""

    def __init__(self, n: int | None, transforms: Iterable[Transform], blocks: Blocks | None = None):
        self._levels: list[Locate] = []
        for transform in transforms:
            # `prepared` and `blocks_after` need the length of the input, `n`.
            after = transform.length(n)
            if transform.reorders:
                self._levels.append(transform.prepared(n, blocks))
                blocks = None if blocks is None else transform.blocks_after(n, blocks)
            n = after
        self.length = n

    def locate(self, ks: np.ndarray, iteration: int, level: int = 0) -> list[Segment]:
        """Return where elements lie in the input of the first transform, or of the reordering one at ``level``."""
        segments: list[Segment] = [(np.arange(len(ks)), ks, iteration)]
        # From the last transform to the first: each maps numbers of its output to its input.
        for locate in reversed(self._levels[level:]):
            segments = [
                (where[part], inner, inner_iteration)
                for where, numbers, outer in segments
                for part, inner, inner_iteration in locate(numbers, outer)
            ]
        return segments

    @property
    def windows(self) -> BlocksShuffled | None:
        """The shuffle in windows, if it is the first transform that reorders elements, otherwise None."""
        first = self._levels[0] if self._levels else None
        return first if isinstance(first, BlocksShuffled) else None


def _groups(keys: np.ndarray) -> Iterator[tuple[int, Any]]:
    # Nearly all batches lie in one repetition: no sorting.
    if len(keys) and keys[0] == keys[-1] and (keys == keys[0]).all():
        yield int(keys[0]), _ALL
        return
    for key in np.unique(keys):
        yield int(key), np.flatnonzero(keys == key)


@dataclass(frozen=True)
class PaddedBatch(Batch):
    """The transform that stacks elements, each padded to the longest, as `Chain.padded_batch`."""

    stacks_arrays: ClassVar[bool] = False

    shapes: Any = None
    values: Any = None

    def stack(self, rows: Sequence[Any], dtypes: Sequence[np.dtype] | None = None) -> Any:
        """Return padded rows as one batch, with these dtypes of its columns.

        Raise ValueError if a row does not fit the shape given, and TypeError if a value does not fit the dtype.
        """
        leaves, rebuild = nest.flatten(rows[0])
        if not leaves:
            return elements.stack(rows)  # raises: there is no array to stack
        shapes = self.shapes_of(rows[0], leaves)
        values = _for_leaves(self.values, rows[0], len(leaves), "padding_values")
        columns = zip(*(nest.flatten(row)[0] for row in rows), strict=True)
        typed = itertools.starmap(elements.of_one_dtype, itertools.zip_longest(columns, dtypes or ()))
        return rebuild([_padded(*column) for column in zip(typed, shapes, values, range(len(leaves)), strict=True)])

    def shapes_of(self, row: Any, leaves: Sequence[Any]) -> list[Any]:
        """Return the shape of each array of a padded row, None for the longest of the batch."""
        return _for_leaves(self.shapes, row, len(leaves), "padded_shapes")

    def spec(self, row: Any, size: int | None) -> Any:
        """Return the specs of a batch, from the specs of a row: None for dimensions of the longest row."""
        leaves, rebuild = nest.flatten(row)
        shapes = _for_leaves(self.shapes, row, len(leaves), "padded_shapes")
        specs = []
        for leaf, shape in zip(leaves, shapes, strict=True):
            sizes = (None,) * len(leaf.shape) if shape is None else _sizes(shape)
            specs.append(ArraySpec((size, *sizes), leaf.dtype))
        return rebuild(specs)

    def __str__(self) -> str:
        return f"padded_{super().__str__()}"

    def without_numbers(self) -> str:
        return "padded_batch"


def _for_leaves(argument: Any, row: Any, count: int, what: str) -> list[Any]:
    """Return the argument for each array of a row. It is one value for all, or has the structure of the row."""
    if argument is None or (what == "padding_values" and not nest.is_nested(argument)):
        return [argument] * count
    if not nest.is_nested(row):
        return [argument]
    values: list[Any] = []

    def walk(tree: Any, like: Any, path: str) -> None:
        if not nest.is_nested(like):
            values.append(tree)
        elif isinstance(like, dict) and isinstance(tree, dict) and sorted(like) == sorted(tree):
            for key in sorted(like):
                walk(tree[key], like[key], f"{path}[{key!r}]")
        elif isinstance(like, tuple) and isinstance(tree, tuple) and len(like) == len(tree):
            for number, (child, inner) in enumerate(zip(tree, like, strict=True)):
                walk(child, inner, f"{path}[{number}]")
        else:
            raise ValueError(f"{what} must have the structure of an element, but {path or 'it'} is {tree!r}")

    walk(argument, row, "")
    return values


def _sizes(shape: Any) -> tuple[int | None, ...]:
    return tuple(None if size is None or size == -1 else int(size) for size in shape)


def _padded(column: Sequence[Any], shape: Any, value: Any, number: int) -> np.ndarray:
    arrays = [np.asarray(array) for array in column]
    dims = arrays[0].ndim
    sizes = (None,) * dims if shape is None else _sizes(shape)
    if len(sizes) != dims or any(array.ndim != dims for array in arrays):
        shapes = sorted({array.shape for array in arrays})
        raise ValueError(
            f"array {number} of the elements has the shapes {shapes}, which padded_batch() cannot pad to {sizes}: "
            "all need the same number of dimensions"
        )
    longest = [max(array.shape[axis] for array in arrays) for axis in range(dims)]
    for axis, size in enumerate(sizes):
        if size is not None and longest[axis] > size:
            raise ValueError(
                f"array {number} of an element is {longest[axis]} long on axis {axis}, but padded_shapes allows "
                f"{size}: give a larger shape, or None for the longest of each batch"
            )
    full = [longest[axis] if size is None else size for axis, size in enumerate(sizes)]
    dtype = np.result_type(*{array.dtype for array in arrays})
    padding = _padding(value, dtype, number)
    if dtype.kind in "US":
        # A padding text may be longer than all texts of the column, and would be cut.
        dtype = np.result_type(dtype, np.asarray(padding).dtype)
    padded = np.full((len(arrays), *full), padding, dtype)
    for number, array in enumerate(arrays):
        index: Any = (number, *(slice(0, size) for size in array.shape))
        padded[index] = array
    return padded


def _padding(value: Any, dtype: np.dtype, number: int) -> Any:
    if value is None:
        return np.zeros((), dtype)[()] if dtype.kind != "O" else None
    array = np.asarray(value)
    # By value: NumPy reads a Python 0 as int64, which no smaller integer type takes.
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        fits = np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    else:
        fits = np.can_cast(array.dtype, dtype, "same_kind") or array.dtype.kind == dtype.kind
    if not fits:
        raise TypeError(f"the padding value {value!r} does not fit array {number} of the elements, of dtype {dtype}")
    return value
