"""Readers of rows without HDF5: they read the bytes of the file directly, without HDF5's global lock."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from mpistrat.data.hdf5.layouts.chunks import ChunkedRows, DecodedChunks
from mpistrat.data.hdf5.layouts.descriptors import Files
from mpistrat.data.hdf5.layouts.raw import ContiguousRows, RowsOfChunks
from mpistrat.data.hdf5.records import Chunked, Column, Contiguous, Joined, Layout
from mpistrat.data.rows.byte_order import native


class RowReader(Protocol):
    """Reader of the rows of one dataset. A new layout is a new class like this and a line in `_of_layout`."""

    def read_run(self, files: Files, first: int, out: np.ndarray) -> None:
        """Read rows from ``first`` on, as many as ``out`` has."""

    def read_rows(self, files: Files, rows: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        """Read ascending rows, each at most once, to the places ``where`` of ``out``."""

    def will_need(self, files: Files, first: int, last: int) -> None:
        """Start read-ahead of the rows from ``first`` up to ``last``."""


def rows_of(column: Column, rows: int, key: Any, decoded: DecodedChunks) -> RowReader:
    """Return the reader of the rows of a column.

    Parameters
    ----------
    column : Column
        A column with a layout other than `ThroughHdf5`.
    rows : int
        Number of rows of the column.
    key : object
        Key of the column in the cache.
    decoded : DecodedChunks
        The cache of decoded chunks, shared by all columns.
    """
    return _of_layout(column, column.layout, rows, key, decoded)


def _of_layout(column: Column, layout: Layout, rows: int, key: Any, decoded: DecodedChunks) -> RowReader:
    if isinstance(layout, Joined):
        return JoinedRows(column, layout, key, decoded)
    if isinstance(layout, Chunked):
        if layout.filters or layout.chunk[1:] != column.shape:
            return ChunkedRows(layout, rows, column.shape, column.stored, key, decoded)
        return RawRows(RowsOfChunks(layout, column.row_bytes), column)
    assert isinstance(layout, Contiguous)
    return RawRows(ContiguousRows(layout, column.row_bytes), column)


class RawRows:
    """Reader of rows stored as in memory. It converts them to the byte order of this machine in place."""

    def __init__(self, rows: ContiguousRows | RowsOfChunks, column: Column):
        self._rows = rows
        self._stored = column.stored
        self._swapped = column.stored != native(column.stored)
        self.will_need = rows.will_need

    def read_run(self, files: Files, first: int, out: np.ndarray) -> None:
        """Read rows from ``first`` on, as many as ``out`` has."""
        self._rows.read_run(files, first, out)
        if self._swapped:
            out[...] = out.view(self._stored).astype(out.dtype)

    def read_rows(self, files: Files, rows: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        """Read ascending rows to the places ``where`` of ``out``."""
        self._rows.read_rows(files, rows, out, where)
        if self._swapped:
            out[where] = out[where].view(self._stored).astype(out.dtype)


class JoinedRows:
    """Reader of a virtual dataset: rows of several layouts, one after another."""

    def __init__(self, column: Column, layout: Joined, key: Any, decoded: DecodedChunks):
        self._firsts = np.array([part.first for part in layout.parts], np.int64)
        self._ends = self._firsts + [part.rows for part in layout.parts]
        self._shifts = np.array([part.source for part in layout.parts], np.int64) - self._firsts
        self._parts = [
            _of_layout(column, part.layout, part.layout_rows, (key, i), decoded)
            for i, part in enumerate(layout.parts)
        ]

    def read_run(self, files: Files, first: int, out: np.ndarray) -> None:
        """Read rows from ``first`` on, as many as ``out`` has."""
        last = first + len(out)
        for i in self._touched(first, last):
            low, high = max(first, int(self._firsts[i])), min(last, int(self._ends[i]))
            self._parts[i].read_run(files, low + int(self._shifts[i]), out[low - first : high - first])

    def read_rows(self, files: Files, rows: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        """Read ascending rows to the places ``where`` of ``out``."""
        cuts = np.searchsorted(rows, self._ends)
        start = int(np.searchsorted(rows, self._firsts[0]))
        for i in np.flatnonzero(np.diff(cuts, prepend=start)).tolist():
            stop = int(cuts[i])
            self._parts[i].read_rows(files, rows[start:stop] + self._shifts[i], out, where[start:stop])
            start = stop

    def will_need(self, files: Files, first: int, last: int) -> None:
        """Start read-ahead of the rows from ``first`` up to ``last``."""
        for i in self._touched(first, last):
            low, high = max(first, int(self._firsts[i])), min(last, int(self._ends[i]))
            self._parts[i].will_need(files, low + int(self._shifts[i]), high + int(self._shifts[i]))

    def _touched(self, first: int, last: int) -> range:
        return range(
            int(np.searchsorted(self._ends, first, side="right")), int(np.searchsorted(self._firsts, last))
        )
