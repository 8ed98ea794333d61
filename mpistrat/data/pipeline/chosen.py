"""Transforms that choose elements by their numbers: selections, parts of a split, and draws by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nest
from mpistrat.data.pipeline.transforms import Locate, Seeded, Segment, Transform
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.blocks import Blocks
from mpistrat.data.rows.lanes import piece
from mpistrat.data.rows.permutation import permutation, random_words
from mpistrat.process.cache import Cache
from mpistrat.runtime.topology import Topology

if TYPE_CHECKING:
    from mpistrat.data.pipeline.definition import Definition

_READ_BYTES = 1 << 20  # of rows that are read in one call for the values of a column


def digest(array: np.ndarray) -> str:
    """Return a short text that differs for other values."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=6).hexdigest()


class Chosen(Transform):
    """The transform that takes the elements with some numbers, the same in every epoch."""

    ascending: bool
    """Whether the elements keep their order."""

    def numbers(self, n: int) -> np.ndarray:
        """Return the numbers of the elements among ``n``, as int64."""
        raise NotImplementedError

    def _numbers_of(self, n: int | None) -> np.ndarray:
        if n is None:
            raise ValueError(f"{self} needs a dataset that ends: call it before repeat()")
        return self.numbers(n)

    def length(self, n: int | None) -> int | None:
        return len(self._numbers_of(n))

    def prepared(self, n: int | None, blocks: Blocks | None) -> Locate:
        return partial(_taken, self._numbers_of(n))

    def blocks_after(self, n: int | None, blocks: Blocks) -> Blocks | None:
        numbers = self._numbers_of(n)
        if not self.ascending or not len(numbers):
            return blocks.in_one_run(len(numbers))
        # A block keeps the same bytes, and has as many of the chosen rows as its share of all.
        rows = max(1, blocks.rows * len(numbers) // int(blocks.starts[-1]))
        return blocks._replace(rows=rows, starts=numbers.searchsorted(blocks.starts))

    def of_files(self, starts: np.ndarray, which: Sequence[int]) -> Select:
        """Return the transform for the rows of some files. ``starts`` has the first row of all files, and the end."""
        numbers = self._numbers_of(int(starts[-1]))
        # Numbers ascend, so the chosen rows of a file are a slice.
        cuts = numbers.searchsorted(starts)
        begins = np.cumsum([0, *np.diff(starts)[which]]).tolist()
        chosen = [
            numbers[cuts[file] : cuts[file + 1]] - starts[file] + begin
            for file, begin in zip(which, begins, strict=False)
        ]
        return Select(np.concatenate(chosen))


def _taken(numbers: np.ndarray, ks: np.ndarray, iteration: int) -> Iterable[Segment]:
    return [(slice(None), numbers[ks], iteration)]


class Select(Chosen):
    """The transform that takes elements in a given order. Negative numbers count from the end."""

    def __init__(self, indices: Any):
        array = np.asarray(indices)
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            raise TypeError(f"select() needs a sequence of integers, not {indices!r:.100}")
        self._indices = array.astype(np.int64)
        # The place of a negative number is known with the length only.
        self.ascending = bool((self._indices[1:] > self._indices[:-1]).all() and (self._indices >= 0).all())

    def numbers(self, n: int) -> np.ndarray:
        indices = self._indices
        outside = (indices < -n) | (indices >= n)
        if outside.any():
            raise IndexError(f"select() got the index {indices[outside][0]}, but the dataset has {n} elements")
        return indices if self.ascending else np.where(indices < 0, indices + n, indices)

    def __repr__(self) -> str:
        return f"select({len(self._indices)} indices, which hash to {digest(self._indices)})"

    __str__ = __repr__


class Keys:
    """One value for each element of a dataset: an array, or a column or function that is read once, when needed.

    With ``predicate``, the value is whether this function of the column is true.
    """

    def __init__(self, rows: Definition, by: Any, what: str, predicate: Any = None):
        self._rows, self._by, self._what, self._predicate = rows, by, what, predicate
        self.functions = [fn for fn in (by, predicate) if callable(fn)]
        self._reads = callable(by) or (isinstance(by, (str, int)) and not isinstance(by, bool))
        self._values: np.ndarray | None = None if self._reads else np.asarray(by)
        if self._values is not None and self._values.ndim != 1:
            raise TypeError(f"{what} must be a column, a function of an element, or a value for each, not {by!r:.100}")
        if self._values is not None:
            self._values = self._apply_predicate(self._values)

    def values(self, n: int) -> np.ndarray:
        """Return a value for each of ``n`` elements."""
        if self._values is None:
            self._values = self._read(0, n)
        if len(self._values) != n:
            raise ValueError(f"{self._what} must have a value for each of the {n} elements, not {len(self._values)}")
        return self._values

    def agree(self, ranks: Topology) -> None:
        """Read the values together with the other ranks, an equal share on each. Collective."""
        if not self._reads:
            return
        everyone = ranks.on_all_ranks(lambda: self._read(*piece(self._rows.length or 0, ranks.size, ranks.rank)))
        self._values = np.concatenate([values for values in everyone if len(values)] or [np.empty(0)])

    def _read(self, first: int, last: int) -> np.ndarray:
        plan, source, chunks = self._rows.plan, self._rows.source, []
        like = plan.element_spec()
        # A column alone is read without the other columns. Functions, and `map` before, need whole elements.
        columns = plan.batch is None and not plan.maps and (isinstance(self._by, str) or nest.is_nested(like))
        columns = columns and not callable(self._by)
        if columns:
            source = source.of_column(self._by)
            like = source.element_spec()
        step = max(1, _READ_BYTES // max(1, spec.row_bytes(like)))
        for start in range(first, last, step):
            ks = np.arange(start, min(start + step, last))
            if columns:
                chunk: Any = np.asarray(self._value_in(source.read(plan.locate(ks, 0))))
            else:
                chunk = [np.asarray(self._value_in(plan.element(k, 0)))[()] for k in ks.tolist()]
            chunks.append(np.asarray(self._apply_predicate(chunk)))
        values = np.concatenate(chunks) if chunks else np.empty(0)
        if values.ndim != 1:
            raise ValueError(f"{self._what} must give one value for each element, but it gives {values.shape[1:]}")
        return values.astype(str) if values.dtype.hasobject else values

    def _apply_predicate(self, values: Any) -> Any:
        return values if self._predicate is None else np.array([bool(self._predicate(x)) for x in values], bool)

    def _value_in(self, element: Any) -> Any:
        if callable(self._by):
            return elements.call(self._by, element)
        try:
            if isinstance(self._by, str) and not isinstance(element, (dict, np.ndarray, np.void)):
                return getattr(element, self._by)
            return element[self._by]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise ValueError(f"{self._what}: elements have no {self._by!r}; one is {element!r:.100}") from None

    def __repr__(self) -> str:
        values = None if self._reads else self._values
        return repr(getattr(self._by, "__qualname__", self._by)) if values is None else f"values {digest(values)}"


@dataclass(frozen=True, repr=False)
class ColumnFilter(Chosen):
    """The transform that takes the elements whose value is true, in their order."""

    keys: Keys
    ascending = True

    def numbers(self, n: int) -> np.ndarray:
        return np.flatnonzero(self.keys.values(n))

    def agree(self, ranks: Topology) -> None:
        self.keys.agree(ranks)

    def __str__(self) -> str:
        return f"filter(by={self.keys})"

    __repr__ = __str__


class SplitParts:
    """A random division into parts, of elements or of groups of elements with an equal key.

    Parts have ``shares`` of the elements; their sum is 1. Of a group that lies across a border, all elements go where
    its middle is.
    """

    def __init__(self, name: str, shares: Sequence[float], seed: int, keys: Keys | None):
        self.name, self._shares, self._seed, self.keys = name, shares, seed, keys
        self._cached: tuple[int, np.ndarray] | None = None

    def __call__(self, n: int) -> np.ndarray:
        """Return the part of each of ``n`` elements."""
        # The datasets of all parts ask for the same division.
        if self._cached is None or self._cached[0] != n:
            self._cached = n, self._divide(n)
        return self._cached[1]

    def _divide(self, n: int) -> np.ndarray:
        count = len(self._shares)
        sizes = np.array([int(n * share + 1e-6) for share in self._shares])  # 1 - 0.8 is less than 0.2
        sizes[: n - sizes.sum()] += 1  # as torch.utils.data.random_split does
        if self.keys is None:
            parts = np.empty(n, np.int32)
            parts[permutation(n, self._seed, 0)] = np.repeat(np.arange(count), sizes)
        else:
            groups, of_group, counts = np.unique(self.keys.values(n), return_inverse=True, return_counts=True)
            order = permutation(len(groups), self._seed, 0)
            # Twice the middles of groups and twice the borders of parts: both are integers.
            middles = 2 * counts[order].cumsum() - counts[order]
            part = (2 * sizes.cumsum()[:-1]).searchsorted(middles, side="right")
            # Each part gets a group, if there are enough.
            rank = np.arange(len(groups))
            part = np.maximum(np.minimum(part, rank), rank + count - len(groups))
            parts = np.empty(len(groups), np.int32)
            parts[order] = np.clip(part, 0, count - 1)
            parts = parts[of_group]
        empty = np.flatnonzero(np.bincount(parts, minlength=count) == 0)
        if len(empty):
            counted = f"{n} elements" if self.keys is None else f"{n} elements in {len(groups)} groups by {self.keys}"
            raise ValueError(f"part {empty[0]} of {self} has no elements: there are {counted}")
        return parts

    def __repr__(self) -> str:
        by = "" if self.keys is None else f", by={self.keys}"
        return f"{self.name}({[*self._shares]}, seed={self._seed}{by})"


@dataclass(frozen=True, repr=False)
class PartOfSplit(Chosen):
    """The transform that takes the elements of some parts of a division, in their order."""

    parts: SplitParts
    which: tuple[int, ...]
    ascending = True

    def numbers(self, n: int) -> np.ndarray:
        return np.flatnonzero(np.isin(self.parts(n), self.which))

    def agree(self, ranks: Topology) -> None:
        if self.parts.keys is not None:
            self.parts.keys.agree(ranks)

    def __str__(self) -> str:
        return f"part {', '.join(map(str, self.which))} of {self.parts}"

    __repr__ = __str__


@dataclass(frozen=True)
class WeightedDraws(Seeded):
    """The transform that draws elements by weight, others in each epoch."""

    weights: Keys
    replacement: bool
    count: int | None
    balanced: bool = False
    """Whether ``weights`` are classes, which are drawn equally often."""
    by_row = True

    def length(self, n: int | None) -> int | None:
        if n is None:
            raise ValueError("sample() needs a dataset that ends: call it before repeat()")
        weights = self._checked(n)
        usable = int(np.count_nonzero(weights))
        count = (n if self.replacement else usable) if self.count is None else self.count
        if not self.replacement and count > usable:
            raise ValueError(f"sample() cannot draw {count} of {usable} elements with a weight without replacement")
        return count

    def _checked(self, n: int) -> np.ndarray:
        weights = self.weights.values(n)
        if self.balanced:
            _, of_class, counts = np.unique(weights, return_inverse=True, return_counts=True)
            # So the weights of each class have the sum 1.
            return (1 / counts)[of_class]
        weights = weights.astype(float)
        if not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
            raise ValueError(f"weights must be finite and at least 0, and one of them above 0, got {weights!r:.100}")
        return weights

    def prepared(self, n: int | None, blocks: Blocks | None) -> Locate:
        return partial(
            self._drawn, self.length(n) or 0, self._checked(n or 0), Cache[int, np.ndarray](2)
        )  # a batch may lie across two epochs

    def _drawn(
        self, count: int, weights: np.ndarray, orders: Cache[int, np.ndarray], ks: np.ndarray, iteration: int
    ) -> Iterable[Segment]:
        order = orders.get(iteration)
        if order is None:
            order = orders.keep(iteration, self._order(count, weights, iteration))
        return [(slice(None), order[ks], iteration)]

    def _order(self, count: int, weights: np.ndarray, iteration: int) -> np.ndarray:
        drawn = count if self.replacement else len(weights)
        # 53 random bits make an even float in [0, 1).
        even = (random_words(drawn, self.seed, iteration, "sample") >> np.uint64(11)) * 2.0**-53
        if self.replacement:
            ends = weights.cumsum()
            even *= ends[-1]
            ends[np.flatnonzero(weights)[-1] :] = np.inf  # a product may be rounded up to the sum
            return ends.searchsorted(even, side="right").astype(np.int64)
        # Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006).
        with np.errstate(divide="ignore"):  # weights of 0
            arrivals = np.where(weights > 0, -np.log1p(-even) / weights, np.inf)
        return np.argsort(arrivals, kind="stable")[:count]

    def agree(self, ranks: Topology) -> None:
        self.weights.agree(ranks)

    def without_numbers(self) -> str:
        argument = "by" if self.balanced else "weights"
        return f"sample({argument}={self.weights}, replacement={self.replacement}, {self.count})"

    def __str__(self) -> str:
        return f"sample({', '.join([f'seed={self.seed}'] * self.seeded)})"
