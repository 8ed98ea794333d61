"""Source of tuples: row k of some datasets, together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nest
from mpistrat.data.combine.parts import CombinedSource, DatasetPart
from mpistrat.data.rows.blocks import Blocks

if TYPE_CHECKING:
    from typing_extensions import Self


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
