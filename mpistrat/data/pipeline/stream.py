"""Pipeline of an iterable, which can be read from its beginning only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from mpistrat import nest
from mpistrat.data.errors import explain_empty_parts
from mpistrat.data.pipeline.mapping import MapAndBatch, mapped_rows, numbered
from mpistrat.data.pipeline.transforms import Open, Transform
from mpistrat.data.rows import elements, spec
from mpistrat.data.rows.contracts import StreamSource
from mpistrat.process.cache import Cache

_OPEN_AT_ONCE = 2  # iterations that are read side by side; an older one begins again

# Maps the number of rows of a batch to the first of the wanted rows, and one past the last.
Cut: TypeAlias = "Callable[[int], tuple[int, int]]"


class StreamPlan:
    """An iterable with its transforms, ready to read. Elements must be requested in ascending order.

    If replicas share the iterable, each calls the functions for the first row, too, and all rows get its dtypes.
    """

    length = row_length = None

    def __init__(self, source: StreamSource, transforms: Sequence[Transform], shared: bool = False):
        self._source, self._transforms = numbered(source, transforms), transforms
        self._map_and_batch = MapAndBatch(transforms, typed=False)
        self.batch, self._row_maps = self._map_and_batch.batch, self._map_and_batch.row_maps
        self._open = Cache[int, _Pass](_OPEN_AT_ONCE)
        self._empty: Any = None
        self._shared = shared

    def rows(self, k: int, iteration: int, cut: Cut | None = None) -> list[Any] | None:
        """Return the rows of element ``k`` before ``map``, or a cut of them; None after the last."""
        reading = self._open.get(iteration)
        # A stream cannot go back: it begins again, and elements before `k` are read and dropped.
        if reading is None or reading.number > k:
            reading = self._open.keep(iteration, _Pass(self._streamed(iteration)))
        rows = reading.element(k)
        return rows if rows is None or cut is None else rows[slice(*cut(len(rows)))]

    def read(self, rows: list[Any]) -> Any:
        """Return the element that is made of these rows; without rows, an empty batch."""
        if self.batch is None:
            return mapped_rows(rows, self._row_maps)[0]
        if not rows:
            return self.empty()
        batch = self._map_and_batch.mapped(self._map_and_batch.stacked(mapped_rows(rows, self._row_maps)))
        if self._empty is None:
            self._empty = spec.no_rows_of(nest.map_structure(spec.of_array, batch))
        return batch

    def element_if_any(self, k: int, iteration: int) -> Any:
        """Return element ``k``, or None after the last."""
        rows = self.rows(k, iteration)
        return None if rows is None else self.read(rows)

    def empty(self) -> Any:
        """Return a batch without rows, with the shapes of the first batch that was read."""
        explain_empty_parts()
        if self._empty is None:
            self.read([self._source.first()])  # keeps the shapes
        return nest.map_structure(np.copy, self._empty)

    def elements(self, iteration: int) -> Iterator[Any]:
        """Return an iterator over the elements of an iteration."""
        return map(self.read, self._streamed(iteration))

    def element_spec(self) -> Any:
        """Return the structure of an element, found by reading the first row if the source does not know it."""
        if self._map_and_batch.batch_maps:
            return spec.any_size(nest.map_structure(spec.of_array, self.read([self._source.first()])))
        row = self._source.element_spec()
        if self._row_maps:
            row = nest.map_structure(spec.of_array, mapped_rows([self._source.first()], self._row_maps)[0])
        return row if self.batch is None else self.batch.spec(row, None)

    def _streamed(self, iteration: int) -> Iterator[list[Any]]:
        open_stream: Open = self._opened
        for transform in self._transforms:
            open_stream = partial(transform.streamed, open_stream)
        whole = open_stream(iteration)
        return whole if self.batch is not None else ([row] for row in whole)

    def _opened(self, iteration: int) -> Iterator[Any]:
        stream = self._source.open(iteration)
        if self._shared and self._map_and_batch.first is None:
            for row in stream:
                # A copy, as functions may write to the row. All replicas take its dtypes.
                self._map_and_batch.first = lambda row=row: [elements.copied(row)]
                return itertools.chain([row], stream)
        return stream


class _Pass:
    def __init__(self, stream: Iterator[Any]):
        self._stream = stream
        self._element: Any = None
        self.number = -1

    def element(self, k: int) -> Any:
        while self.number < k:
            self._element = next(self._stream, None)  # None also when asked again after the last
            self.number += 1
        return self._element
