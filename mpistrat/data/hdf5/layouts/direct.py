"""Readers of rows without HDF5: they read the bytes of the file directly, without HDF5's global lock."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from mpistrat.data.hdf5.layouts.chunks import ChunkedRows, DecodedChunks
from mpistrat.data.hdf5.layouts.descriptors import Files
from mpistrat.data.hdf5.layouts.raw import RawRows
from mpistrat.data.hdf5.records import Chunked, Column, Contiguous, Joined, Layout


class RowReader(Protocol):
    """Reader of the rows of one dataset. A new layout is a new class like this and a line in `reader_of`."""

    def read_run(self, files: Files, first: int, out: np.ndarray) -> None:
        """Read rows from ``first`` on, as many as ``out`` has."""

    def read_rows(self, files: Files, rows: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        """Read ascending rows, each at most once, to the places ``where`` of ``out``."""

    def will_need(self, files: Files, first: int, last: int) -> None:
        """Start read-ahead of the rows from ``first`` up to ``last``."""


def reader_of(column: Column, layout: Layout, rows: int, key: Any, decoded: DecodedChunks) -> RowReader:
    """Return the reader of so many ``rows`` of a column, or of a part of it; ``key`` is theirs in the cache."""
    if isinstance(layout, Joined):
        return JoinedRows(column, layout, key, decoded)
    if isinstance(layout, Chunked) and (layout.filters or layout.chunk[1:] != column.shape):
        return ChunkedRows(layout, rows, column.shape, column.stored, key, decoded)
    assert isinstance(layout, (Chunked, Contiguous))
    return RawRows(layout, column)


class JoinedRows:
    """Reader of a virtual dataset: rows of several layouts, one after another."""

    def __init__(self, column: Column, layout: Joined, key: Any, decoded: DecodedChunks):
        self._firsts = np.array([part.first for part in layout.parts], np.int64)
        self._ends = self._firsts + [part.rows for part in layout.parts]
        self._shifts = np.array([part.source for part in layout.parts], np.int64) - self._firsts
        self._parts = [
            reader_of(column, part.layout, part.layout_rows, (key, i), decoded) for i, part in enumerate(layout.parts)
        ]

    def read_run(self, files: Files, first: int, out: np.ndarray) -> None:
        last = first + len(out)
        for i in self._touched(first, last):
            low, high = max(first, int(self._firsts[i])), min(last, int(self._ends[i]))
            self._parts[i].read_run(files, low + int(self._shifts[i]), out[low - first : high - first])

    def read_rows(self, files: Files, rows: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        cuts = np.searchsorted(rows, self._ends)
        start = int(np.searchsorted(rows, self._firsts[0]))
        for i in np.flatnonzero(np.diff(cuts, prepend=start)).tolist():
            stop = int(cuts[i])
            self._parts[i].read_rows(files, rows[start:stop] + self._shifts[i], out, where[start:stop])
            start = stop

    def will_need(self, files: Files, first: int, last: int) -> None:
        for i in self._touched(first, last):
            low, high = max(first, int(self._firsts[i])), min(last, int(self._ends[i]))
            self._parts[i].will_need(files, low + int(self._shifts[i]), high + int(self._shifts[i]))

    def _touched(self, first: int, last: int) -> range:
        return range(int(np.searchsorted(self._ends, first, side="right")), int(np.searchsorted(self._firsts, last)))
