"""Readers of rows stored as in memory: contiguous ones, and those in chunks without filters."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.data.hdf5.layouts.descriptors import Descriptor, Files
from mpistrat.data.hdf5.records import Chunked, Contiguous

_GAP = 16 << 10  # reading a gap of these bytes takes no longer than another system call
_SMALL_ROW = 2 << 10
_WORTH_MERGING = 1 / 4  # fewer near rows, as of a shuffle, are read sooner than they are found
_MOST_OF_GAPS = 4 << 20


class ContiguousRows:
    """Reader of rows that lie one after another, in one extent or more."""

    def __init__(self, layout: Contiguous, row_bytes: int):
        self._extents = layout.extents
        self._row_bytes = row_bytes

    def read_run(self, files: Files, first: int, out: np.ndarray) -> None:
        """Read rows from ``first`` on, as many as ``out`` has."""
        view, begin = as_bytes(out).data, first * self._row_bytes
        end = begin + len(view)
        for extent in self._extents:
            low, high = max(begin, extent.start), min(end, extent.start + extent.size)
            if low < high:
                offset = extent.offset + low - extent.start
                files[extent.file].read(offset, [view[low - begin : high - begin]])

    def read_rows(self, files: Files, rows: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        """Read ascending rows to the places ``where`` of ``out``."""
        if len(self._extents) == 1:
            extent = self._extents[0]
            scatter(files[extent.file], extent.offset + rows * self._row_bytes, self._row_bytes, out, where)
            return
        for row, place in zip(rows.tolist(), where.tolist(), strict=True):
            self.read_run(files, row, out[place : place + 1])

    def will_need(self, files: Files, first: int, last: int) -> None:
        """Start read-ahead of the rows from ``first`` up to ``last``."""
        begin, end = first * self._row_bytes, last * self._row_bytes
        for extent in self._extents:
            low, high = max(begin, extent.start), min(end, extent.start + extent.size)
            if low < high:
                files[extent.file].will_need(extent.offset + low - extent.start, high - low)


class RowsOfChunks:
    """Reader of chunks without filters that hold whole rows. Their bytes are the same as in memory."""

    def __init__(self, layout: Chunked, row_bytes: int):
        self._file = layout.file
        self._rows = layout.chunk[0]
        self._row_bytes = row_bytes
        self._offsets, _ = layout.places()
        # The chunks that are not followed directly by the next chunk in the file.
        self._gaps = np.flatnonzero(self._offsets[1:] != self._offsets[:-1] + self._rows * row_bytes)

    def read_run(self, files: Files, first: int, out: np.ndarray) -> None:
        """Read rows from ``first`` on, as many as ``out`` has."""
        view = as_bytes(out).data
        for offset, size in self._runs(first, first + len(out)):
            files[self._file].read(offset, [view[:size]])
            view = view[size:]

    def read_rows(self, files: Files, rows: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        """Read ascending rows to the places ``where`` of ``out``."""
        chunk, inside = np.divmod(rows, self._rows)
        offsets = self._offsets[chunk] + inside * self._row_bytes
        scatter(files[self._file], offsets, self._row_bytes, out, where)

    def will_need(self, files: Files, first: int, last: int) -> None:
        """Start read-ahead of the rows from ``first`` up to ``last``."""
        for offset, size in self._runs(first, last):
            files[self._file].will_need(offset, size)

    def _runs(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return offset and size of the runs of bytes that hold the rows."""
        size, low, high = self._rows, first // self._rows, -(-last // self._rows)
        gaps = self._gaps
        if len(gaps):
            gaps = gaps[gaps.searchsorted(low) : gaps.searchsorted(high - 1)]
        runs = []
        for start, stop in pairwise([low, *(gaps + 1).tolist(), high]):
            begin, end = max(first, start * size), min(last, stop * size)
            offset = int(self._offsets[start]) + (begin - start * size) * self._row_bytes
            runs.append((offset, (end - begin) * self._row_bytes))
        return runs


def scatter(file: Descriptor, offsets: np.ndarray, size: int, out: np.ndarray, where: np.ndarray) -> None:
    """Read rows of ``size`` bytes at these offsets to these places of ``out``. Near rows are read in one call."""
    gaps = offsets[1:] - offsets[:-1] - size
    view = as_bytes(out).data
    near = np.count_nonzero(gaps <= _GAP)
    if not near or (size >= _GAP and near < len(gaps) * _WORTH_MERGING):
        file.read_each(offsets.tolist(), size, view, (where * size).tolist())
        return
    if gaps.min() < 0:  # chunks may have any order in the file
        order = np.argsort(offsets, kind="stable")
        offsets, where = offsets[order], where[order]
        gaps = offsets[1:] - offsets[:-1] - size
    cuts = (np.flatnonzero(gaps > _GAP) + 1).tolist()
    if size < _SMALL_ROW:
        for start, stop in pairwise([0, *cuts, len(where)]):
            _through_memory(file, offsets[start:stop], size, out, where[start:stop])
        return
    # Rows that follow each other both in the file and in memory become one piece.
    new = np.flatnonzero((gaps != 0) | (where[1:] != where[:-1] + 1)) + 1
    firsts, lasts = np.append(0, new), np.append(new - 1, len(where) - 1)
    begins, ends = (where[firsts] * size).tolist(), ((where[lasts] + 1) * size).tolist()
    between, at = gaps[lasts[:-1]].tolist(), offsets[firsts].tolist()
    for start, stop in pairwise([0, *firsts.searchsorted(cuts).tolist(), len(begins)]):
        pieces = [view[begins[start] : ends[start]]]
        for i in range(start + 1, stop):
            if between[i - 1]:
                pieces.append(memoryview(bytearray(between[i - 1])))
            pieces.append(view[begins[i] : ends[i]])
        file.read(at[start], pieces)


def _through_memory(
    file: Descriptor, offsets: np.ndarray, size: int, out: np.ndarray, where: np.ndarray
) -> None:
    """Read small rows through a buffer, together with all bytes between them."""
    flat = out.reshape(len(out), -1).view(np.uint8).reshape(len(out), size)
    start = 0
    while start < len(offsets):
        stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + _MOST_OF_GAPS)))
        span = np.empty(int(offsets[stop - 1] - offsets[start]) + size, np.uint8)
        file.read(int(offsets[start]), [span.data])
        windows = np.lib.stride_tricks.sliding_window_view(span, size)
        flat[where[start:stop]] = windows[offsets[start:stop] - offsets[start]]
        start = stop
