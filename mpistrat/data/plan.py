"""A pipeline made ready to read: any element, any rows of any batch, in any iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.data import elements, spec
from mpistrat.data.contracts import Source
from mpistrat.data.transforms import Batch, Map, Order, Transform

_READ_AHEAD_BYTES = 1 << 20
_READ_AHEAD_ROWS = 1024


class Plan:
    """What a source and its transforms come to.

    Attributes
    ----------
    length : int or None
        How many elements an iteration has, None if it is endless.
    batch : Batch or None
        How rows are batched; None for a dataset of single rows.
    """

    def __init__(self, source: Source, transforms: Sequence[Transform]):
        at = next((i for i, each in enumerate(transforms) if isinstance(each, Batch)), len(transforms))
        rows, batches = transforms[:at], transforms[at + 1 :]
        self._source = source
        self._rows = Order(len(source), rows)
        self._row_maps = [each.fn for each in rows if isinstance(each, Map)]
        self._no_mapped_rows: Any = None
        self.batch: Batch | None = None
        self.length = self._rows.length
        if at < len(transforms):
            batch = transforms[at]
            assert isinstance(batch, Batch)
            self.batch = batch
            self._batches = Order(batch.length(self._rows.length), batches)
            self._batch_maps = [each.fn for each in batches if isinstance(each, Map)]
            self.length = self._batches.length

    def size(self, k: int, iteration: int) -> int:
        """How many rows batch ``k`` has."""
        number, _ = self._batch_at(k, iteration)
        return self._size(number)

    def piece(self, k: int, first: int, last: int, iteration: int) -> Any:
        """Rows ``first`` up to ``last`` of batch ``k``; no other row is read."""
        assert self.batch is not None
        if first == last:
            return self.empty()
        number, inner = self._batch_at(k, iteration)
        start = number * self.batch.size
        return self._map_batch(self._read(np.arange(start + first, start + last), inner))

    def whole(self, k: int, iteration: int) -> Any:
        """Element ``k``: a batch, or a single row if the dataset is not batched."""
        if self.batch is None:
            rows = self._source.read(self._locate(np.array([k]), iteration))
            return elements.mapped(next(elements.rows_of(rows)), self._row_maps)
        return self.piece(k, 0, self.size(k, iteration), iteration)

    def empty(self) -> Any:
        """A batch without rows."""
        return self._map_no_rows(self._read(np.empty(0, np.int64), 0))

    def elements(self, iteration: int) -> Iterator[Any]:
        """All elements of an iteration, one after another."""
        if self.batch is not None:
            k = 0
            while self.length is None or k < self.length:
                yield self.whole(k, iteration)
                k += 1
            return
        row_bytes = sum(
            s.dtype.itemsize * int(np.prod(s.shape)) for s in nest.flatten(self._source.element_spec())[0]
        )
        ahead = max(1, min(_READ_AHEAD_ROWS, _READ_AHEAD_BYTES // max(1, row_bytes)))
        start = 0
        while self.length is None or start < self.length:
            stop = start + ahead if self.length is None else min(start + ahead, self.length)
            block = self._source.read(self._locate(np.arange(start, stop), iteration))
            for row in elements.rows_of(block):
                yield elements.mapped(row, self._row_maps)
            start = stop

    def element_spec(self) -> Any:
        """The structure of an element. With maps, they are tried on the first row of the source."""
        if self.batch is None:
            return self._row_spec()
        size = self.batch.size if self.batch.drop_remainder else None
        if not self._batch_maps:
            return spec.stacked(self._row_spec(), size)
        # A dimension that follows the number of rows is the batch dimension.
        few, more = (
            nest.map_structure(spec.of_array, self._map_batch(self._probe(count))) for count in (1, 2)
        )
        return nest.map_structure(lambda a, b: _common(a, b, size), few, more)

    def _row_spec(self) -> Any:
        if not self._row_maps:
            return self._source.element_spec()
        return nest.map_structure(spec.of_array, next(elements.rows_of(self._probe(1))))

    def _batch_at(self, k: int, iteration: int) -> tuple[int, int]:
        ((_, numbers, inner),) = self._batches.locate(np.array([k]), iteration)
        return int(numbers[0]), inner

    def _size(self, number: int) -> int:
        assert self.batch is not None
        if self._rows.length is None:
            return self.batch.size
        return min(self.batch.size, self._rows.length - number * self.batch.size)

    def _locate(self, ks: np.ndarray, iteration: int) -> np.ndarray:
        rows = np.empty(len(ks), np.int64)
        for where, numbers, _ in self._rows.locate(ks, iteration):
            rows[where] = numbers
        return rows

    def _read(self, ks: np.ndarray, iteration: int) -> Any:
        if len(ks) == 0 and self._row_maps:
            return self._empty_mapped_rows()
        return self._map_rows(self._source.read(self._locate(ks, iteration)))

    def _map_rows(self, tree: Any) -> Any:
        if not self._row_maps:
            return tree
        tree = elements.stack([elements.mapped(row, self._row_maps) for row in elements.rows_of(tree)])
        if self._no_mapped_rows is None:
            self._no_mapped_rows = nest.map_structure(lambda x: x[:0].copy(), tree)
        return tree

    def _map_batch(self, tree: Any) -> Any:
        for fn in self._batch_maps:
            tree = elements.call(fn, tree)
        return tree

    def _map_no_rows(self, tree: Any) -> Any:
        try:
            return self._map_batch(tree)
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(
                    "map() was called with a batch of no rows, which is what a replica gets when a global "
                    "batch has too few rows for all: the function must accept arrays of length 0"
                )
            raise

    def _empty_mapped_rows(self) -> Any:
        if self._no_mapped_rows is None:
            self._probe(1)
        return nest.map_structure(np.copy, self._no_mapped_rows)

    def _probe(self, count: int) -> Any:
        if len(self._source):
            rows = self._source.read(np.zeros(count, np.int64))
        else:
            rows = spec.zeros(self._source.element_spec(), count)
        return self._map_rows(rows)


def _common(few: spec.ArraySpec, more: spec.ArraySpec, size: int | None) -> spec.ArraySpec:
    if len(few.shape) != len(more.shape):
        raise ValueError(
            "the function given to map() makes arrays of different numbers of dimensions: shape "
            f"{few.shape} of one row and {more.shape} of two"
        )
    shape = [a if a == b else None for a, b in zip(few.shape, more.shape, strict=True)]
    if shape and shape[0] is None and (few.shape[0], more.shape[0]) == (1, 2):
        shape[0] = size
    return spec.ArraySpec(shape, few.dtype)
