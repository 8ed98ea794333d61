"""Source of rows that are kept in memory after they were made once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.data.combine.combined import CombinedSource, DatasetPart
from mpistrat.data.pipeline.prefetch import MakingLock
from mpistrat.data.rows import spec
from mpistrat.data.rows.blocks import Blocks


class CachedSource(CombinedSource):
    """The rows of the first iteration of a dataset. This process keeps those that it has read."""

    word = "cache"

    def __init__(self, parts: Sequence[DatasetPart]):
        super().__init__(parts)
        (self._part,) = parts
        self._lock = MakingLock()
        self._held: np.ndarray | None = None
        self._columns: list[_Kept] = []
        self._rebuild: Any = None

    @property
    def length(self) -> int | None:
        return self._part.length

    def element_spec(self) -> Any:
        """Return the structure of the first row, which is kept."""
        if not self.length:
            return self._part.plan.element_spec()
        return nest.map_structure(spec.of_array, self.each(np.zeros(1, np.int64))[0])

    def read(self, rows: np.ndarray) -> Any:
        with self._lock:
            self._make(rows)
            if all(column.alike for column in self._columns):
                return self._rebuild([column.values.take(rows, 0) for column in self._columns])
        return super().read(rows)

    def each(self, rows: np.ndarray) -> list[Any]:
        with self._lock:
            self._make(rows)
            columns = [column.values.take(rows, 0) for column in self._columns]
            return [
                self._rebuild([each.copy() if hasattr(each, "copy") else each for each in row])
                for row in zip(*columns, strict=True)
            ]

    def blocks(self) -> Blocks | None:
        return self._part.blocks()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None, "_columns": [], "_rebuild": None}

    def _make(self, rows: np.ndarray) -> None:
        """Make the rows that are not kept yet."""
        if self._held is None:
            self._held = np.zeros(len(self), bool)
        missing = np.unique(rows[~self._held[rows]])
        if not len(missing):
            return
        numbers = self._part.numbers(missing, 0)
        made = self._part.plan.each(self._part.of_numbers(numbers))
        leaves, self._rebuild = nest.flatten(made[0])
        columns = self._columns or [_Kept(len(self._held)) for _ in leaves]
        for number, column in enumerate(columns):
            column.keep(missing, self._held, [nest.flatten(row)[0][number] for row in made])
        self._columns = columns
        self._held[missing] = True


class _Kept:
    """The values of one leaf for all rows: one array, or an array of arrays if their shapes or dtypes differ."""

    def __init__(self, rows: int):
        self._rows = rows
        self.values: Any = None
        self.alike = True

    def keep(self, rows: np.ndarray, held: np.ndarray, leaves: list[Any]) -> None:
        """Keep the values of some rows. ``held`` says which rows are kept already."""
        kinds = {(np.shape(leaf), np.asarray(leaf).dtype) for leaf in leaves}
        if self.values is not None:
            kinds.add((self.values.shape[1:], self.values.dtype) if self.alike else ((), np.dtype("O")))
        if self.alike and len(kinds) > 1:
            before, self.alike = self.values, False
            self.values = np.empty(self._rows, object)
            for row in np.flatnonzero(held).tolist():
                self.values[row] = before[row]
        if not self.alike:
            for row, leaf in zip(rows.tolist(), leaves, strict=True):
                self.values[row] = leaf
            return
        if self.values is None:
            ((shape, dtype),) = kinds
            self.values = np.empty((self._rows, *shape), dtype)
        self.values[rows] = leaves
