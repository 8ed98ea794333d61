"""Sources of rows of their parts: one after another, side by side, or drawn by weight."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nest
from mpistrat.data.combine.parts import CombinedSource, DatasetPart, OfParts
from mpistrat.data.combine.streamed import Openers, StreamedSource, alike
from mpistrat.data.errors import DatasetMismatchError
from mpistrat.data.pipeline.prefetch import MakingLock
from mpistrat.data.rows.blocks import Blocks
from mpistrat.data.rows.contracts import Seed
from mpistrat.data.rows.spec import ArraySpec
from mpistrat.process.cache import Cache

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpistrat.runtime.topology import Topology

_DRAWS = 4096
_BLOCKS_KEPT = 8
_END = object()


class ChosenSource(CombinedSource):
    """Rows of some parts. A row has the number of its part, and the numbers that it has there."""

    def chosen(self, ks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the part of each row, and the number of the row in that part."""
        raise NotImplementedError

    def element_spec(self) -> Any:
        """Return the structure of one row, or raise DatasetMismatchError. None is a dimension in which parts differ."""
        found = self.parts[0].plan.element_spec()
        for number, part in enumerate(self.parts[1:], 1):
            found = common_spec((0, found), (number, part.plan.element_spec()))
        return found

    def ready(self, memory: int, sharing: int | None = None, ranks: Topology | None = None) -> Self:
        """Return the source with parts that are ready for their shuffles, and are alike."""
        found = super().ready(memory, sharing, ranks)
        found.element_spec()
        return found

    def numbers(self, ks: np.ndarray, iteration: int) -> np.ndarray:
        """Return the number of the part of each row, and its numbers there."""
        made = np.zeros((len(ks), 1 + max(part.numbers_of_row for part in self.parts)), np.int64)
        if len(ks):
            made[:, 0], inside = self.chosen(ks)
            for number, part in enumerate(self.parts):
                here = np.flatnonzero(made[:, 0] == number)
                if len(here):
                    made[here, 1 : 1 + part.numbers_of_row] = part.numbers(inside[here], iteration)
        return made

    def each(self, rows: np.ndarray) -> list[Any]:
        found: list[Any] = [None] * len(rows)
        for part, here, mine in self._divided(rows):
            for at, row in zip(here.tolist(), part.plan.each(mine), strict=True):
                found[at] = row
        return found

    def read(self, rows: np.ndarray) -> Any:
        divided = self._divided(rows)
        trees = [part.plan.read_rows(mine) for part, _, mine in divided]
        if len(trees) == 1:
            return trees[0]
        specs = [nest.map_structure(lambda x: ArraySpec(x.shape[1:], x.dtype), tree) for tree in trees]
        for other in specs[1:]:
            if other != specs[0]:
                raise DatasetMismatchError(
                    f"rows of one batch must be alike, but {self} has rows of {specs[0]} and of {other}: map() one of "
                    "the datasets to the form of the other"
                )
        _, rebuild = nest.flatten(trees[0])
        columns = zip(*(nest.flatten(tree)[0] for tree in trees), strict=True)
        made = []
        for column in columns:
            out = np.empty((len(rows), *column[0].shape[1:]), column[0].dtype)
            for values, (_, here, _) in zip(column, divided, strict=True):
                out[here] = values
            made.append(out)
        return rebuild(made)

    def _divided(self, rows: np.ndarray) -> list[tuple[DatasetPart, np.ndarray, np.ndarray]]:
        """Return each part that has some of the rows, their places, and their numbers in the part."""
        found = []
        for number, part in enumerate(self.parts):
            here = np.flatnonzero(rows[:, 0] == number)
            if len(here):
                found.append((part, here, part.of_numbers(rows[here, 1 : 1 + part.numbers_of_row])))
        return found


def common_spec(a: tuple[int, Any], b: tuple[int, Any]) -> Any:
    """Return the structure of elements of two datasets, given with their numbers, or raise DatasetMismatchError."""
    (number, one), (number_of_other, other) = a, b
    leaves, rebuild = nest.flatten(one)
    others, _ = nest.flatten(other)
    same = nest.take_apart(one).form == nest.take_apart(other).form
    if not same or any(a.dtype != b.dtype or len(a.shape) != len(b.shape) for a, b in zip(leaves, others, strict=True)):
        raise DatasetMismatchError(
            f"datasets that follow each other must have elements of one structure and dtype, but dataset {number} has "
            f"{one} and dataset {number_of_other} has {other}: map() one of them to the form of the other"
        )
    return rebuild(
        [
            ArraySpec([m if m == n else None for m, n in zip(a.shape, b.shape, strict=True)], a.dtype)
            for a, b in zip(leaves, others, strict=True)
        ]
    )


class ConcatenatedSource(ChosenSource):
    """All rows of the first part, then those of the next. An endless part is the last."""

    word = "concatenate"

    @property
    def length(self) -> int | None:
        lengths = [part.length for part in self.parts]
        finite = [each for each in lengths if each is not None]
        return sum(finite) if len(finite) == len(lengths) else None

    def chosen(self, ks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        starts = self._starts()
        which = starts.searchsorted(ks, side="right") - 1
        return which, ks - starts[which]

    def blocks(self) -> Blocks | None:
        """Return the blocks of the largest part, in all parts."""
        found = [part.blocks() for part in self.parts]
        known = [each for each in found if each is not None]
        if len(known) < len(found) or self.length is None:
            return None
        starts = [start + each.starts[:-1] for start, each in zip(self._starts(), known, strict=True)]
        largest = max(known, key=lambda each: int(each.starts[-1]))
        return largest._replace(starts=np.concatenate([*starts, [self.length]]))

    def _starts(self) -> np.ndarray:
        starts = [0]
        for part in self.parts[:-1]:
            if part.length is None:
                break
            starts.append(starts[-1] + part.length)
        return np.array(starts, np.int64)


class ZippedSource(CombinedSource):
    """Row k of all parts, in a structure whose leaves stand for the parts in order, up to the end of the shortest."""

    word = "zip"

    def __init__(self, parts: Sequence[DatasetPart], structure: Any):
        super().__init__(parts)
        self._structure = structure
        _, self._rebuild = nest.flatten(structure)

    def of_parts(self, parts: Sequence[DatasetPart]) -> Self:
        return type(self)(parts, self._structure)

    @property
    def length(self) -> int | None:
        return min((part.length for part in self.parts if part.length is not None), default=None)

    def element_spec(self) -> Any:
        return self._rebuild([part.plan.element_spec() for part in self.parts])

    def numbers(self, ks: np.ndarray, iteration: int) -> np.ndarray:
        return np.concatenate([part.numbers(ks, iteration) for part in self.parts], axis=1)

    def each(self, rows: np.ndarray) -> list[Any]:
        columns = [part.plan.each(part.of_numbers(mine)) for part, mine in self._divided(rows)]
        return [self._rebuild(list(row)) for row in zip(*columns, strict=True)]

    def read(self, rows: np.ndarray) -> Any:
        return self._rebuild([part.plan.read_rows(part.of_numbers(mine)) for part, mine in self._divided(rows)])

    def blocks(self) -> Blocks | None:
        """Return the blocks of the first part that has some, if each row has its own number in it."""
        for part in self.parts:
            found = part.blocks()
            if found is not None and self.length is not None:
                return found.in_one_run(self.length) if found.starts[-1] != self.length else found
        return None

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *np.cumsum([part.numbers_of_row for part in self.parts]).tolist()]

    def _divided(self, rows: np.ndarray) -> list[tuple[DatasetPart, np.ndarray]]:
        cuts = pairwise(self._ends)
        return [(part, rows[:, first:last]) for part, (first, last) in zip(self.parts, cuts, strict=True)]


def drawn(seed: int, weights: Sequence[float], block: int, left: np.ndarray) -> np.ndarray:
    """Return a block of random choices between the datasets that are ``left``; empty if these have no weight."""
    usable = np.where(left, np.asarray(weights, float), 0.0)
    total = usable.sum()
    if not total:
        return np.empty(0, np.int64)
    key = hashlib.blake2b(f"{seed}/choices/{block}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(_DRAWS)
    ends = np.cumsum(usable) / total
    ends[np.flatnonzero(usable)[-1] :] = 1.0
    return ends.searchsorted((words >> np.uint64(11)) * 2.0**-53, side="right")


class Choices:
    """The dataset of every row of a mixture, and which row of the dataset it is.

    Blocks of choices are drawn from the first one on. Only the rows that each dataset has given before a block are
    kept: 8 bytes for each dataset and 4096 rows. With ``stop`` the rows end with the first choice of a dataset that has
    none left. Otherwise such choices are left out.
    """

    def __init__(self, seed: int, weights: Sequence[float], lengths: Sequence[int | None], stop: bool):
        self._seed, self._weights = seed, weights
        self._lengths = np.array([np.iinfo(np.int64).max if each is None else each for each in lengths])
        self._stop = stop
        self._ends = [0]
        self._before = [np.zeros(len(lengths), np.int64)]
        self._over = False
        self._lock = MakingLock()  # datasets made of one mixture may be read ahead at the same time
        self._made = Cache[int, np.ndarray](_BLOCKS_KEPT)
        used = [length for length, weight in zip(lengths, weights, strict=True) if weight]
        finite = [each for each in used if each is not None]
        self._endless = not finite if stop else len(finite) < len(used)
        self._sum = sum(finite)

    @property
    def length(self) -> int | None:
        """Number of rows. None if they are endless. With ``stop``, all blocks are drawn for it once."""
        if self._endless:
            return None
        if not self._stop:
            return self._sum
        with self._lock:
            while not self._over:
                self._draw()
        return self._ends[-1]

    def __call__(self, ks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset of each row, and the number of the row in it."""
        with self._lock:
            return self._chosen(ks)

    def _chosen(self, ks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        last = int(ks.max())
        while self._ends[-1] <= last and not self._over:
            self._draw()
        ends = np.array(self._ends)
        blocks = ends.searchsorted(ks, side="right") - 1
        which, number = np.empty(len(ks), np.int64), np.empty(len(ks), np.int64)
        for block in np.unique(blocks).tolist():
            here = np.flatnonzero(blocks == block)
            chosen = self._block(block)
            inside = ks[here] - ends[block]
            which[here] = chosen[inside]
            for each in np.unique(which[here]).tolist():
                mine = here[which[here] == each]
                counted = np.cumsum(chosen == each) - 1
                number[mine] = self._before[block][each] + counted[ks[mine] - ends[block]]
        return which, number

    def _draw(self) -> None:
        """Draw one more block."""
        chosen, over = self._cut(len(self._ends) - 1)
        self._over = over
        self._ends.append(self._ends[-1] + len(chosen))
        self._before.append(self._before[-1] + np.bincount(chosen, minlength=len(self._lengths)))

    def _block(self, block: int) -> np.ndarray:
        found = self._made.get(block)
        return self._made.keep(block, self._cut(block)[0]) if found is None else found

    def _cut(self, block: int) -> tuple[np.ndarray, bool]:
        """Return the choices of a block that have a row, and whether no rows follow."""
        left = self._lengths - self._before[block]
        usable = np.ones(len(left), bool) if self._stop else left > 0
        chosen = drawn(self._seed, self._weights, block, usable)
        if not len(chosen):
            return chosen, True
        keep = np.ones(len(chosen), bool)
        for each in np.flatnonzero(left < len(chosen)).tolist():
            keep[np.flatnonzero(chosen == each)[left[each] :]] = False
        if self._stop and not keep.all():
            return chosen[: int(keep.argmin())], True
        return chosen[keep], False


class Drawn(OfParts):
    """Parts that give their rows in order, as they are drawn. With ``stop`` the rows end where a part has none left."""

    word = "sample_from_datasets"

    def __init__(self, parts: Sequence[DatasetPart], weights: Sequence[float], seed: Seed, stop: bool):
        super().__init__(parts)
        self._weights, self._seed, self._stop = weights, seed, stop

    def of_parts(self, parts: Sequence[DatasetPart]) -> Self:
        return type(self)(parts, self._weights, self._seed, self._stop)

    def seeds(self) -> list[Seed]:
        return [self._seed, *super().seeds()]

    def with_seeds(self, seeds: Sequence[int]) -> Self:
        parts = super().with_seeds(seeds[1:]).parts
        return type(self)(parts, self._weights, self._seed._replace(value=seeds[0]), self._stop)

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "weights": [float(each) for each in self._weights], "stop": self._stop}

    def fingerprint(self) -> Any:
        seed = self._seed.value if self._seed.given else None
        return f"{super().fingerprint()} weights={list(self._weights)} seed={seed} stop={self._stop}"


class MixedSource(Drawn, ChosenSource):
    """The mixture of parts whose rows can be read in any order."""

    @cached_property
    def _choices(self) -> Choices:
        lengths = [part.length for part in self.parts]
        return Choices(self._seed.value, self._weights, lengths, self._stop)

    @property
    def length(self) -> int | None:
        return self._choices.length

    def chosen(self, ks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._choices(ks)


class MixedStream(Drawn, StreamedSource):
    """The mixture of parts of which one can be read only in order, or has an unknown length."""

    def combine(self, openers: Openers) -> Iterator[Any]:
        """Yield elements of the parts, as they are drawn."""
        streams = alike(openers)
        left = np.ones(len(streams), bool)
        for block in itertools.count():
            chosen = drawn(self._seed.value, self._weights, block, left)
            if not len(chosen):
                return
            for each in chosen.tolist():
                if not left[each]:
                    continue
                element = next(streams[each], _END)
                if element is not _END:
                    yield element
                elif self._stop:
                    return
                else:
                    left[each] = False
