"""Sources of rows of their parts: each row is one of a part, or has a row of each part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nest
from mpistrat.data.combine.parts import CombinedSource, DatasetPart
from mpistrat.data.errors import DatasetMismatchError
from mpistrat.data.rows.blocks import Blocks
from mpistrat.data.rows.spec import ArraySpec
from mpistrat.runtime.topology import Topology

if TYPE_CHECKING:
    from typing_extensions import Self


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
