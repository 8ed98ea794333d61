"""Reader of rows stored as in memory: contiguous ones, and those in chunks without filters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.data.hdf5.layouts.descriptors import Descriptor, Files
from mpistrat.data.hdf5.records import Chunked, Column, Contiguous
from mpistrat.data.rows.spec import native

_GAP = 16 << 10  # reading a gap of these bytes takes no longer than another system call
_SMALL_ROW = 2 << 10
_WORTH_MERGING = 1 / 4  # fewer near rows, as of a shuffle, are read sooner than they are found
_MOST_OF_GAPS = 4 << 20


class RawRows:
    """Reader of rows that lie as in memory, in extents: of the layout, or chunks that follow each other in the file."""

    def __init__(self, layout: Contiguous | Chunked, column: Column):
        self._row_bytes, self._stored = column.row_bytes, column.stored
        self._swapped = column.stored != native(column.stored)
        if isinstance(layout, Chunked):
            self._files = [layout.file] * len(layout.run_starts)
            self._offsets = layout.run_offsets
            self._starts = layout.run_starts * (layout.chunk[0] * column.row_bytes)
        else:
            self._files = [extent.file for extent in layout.extents]
            self._offsets = np.array([extent.offset for extent in layout.extents], np.int64)
            self._starts = np.array([extent.start for extent in layout.extents], np.int64)
        # Else a row may lie in two extents, as in external files.
        self._whole = len({*self._files}) == 1 and not (self._starts % max(1, column.row_bytes)).any()

    def read_run(self, files: Files, first: int, out: np.ndarray) -> None:
        view, begin = as_bytes(out).data, first * self._row_bytes
        for file, offset, low, high in self._pieces(begin, begin + len(view)):
            files[file].read(offset, [view[low - begin : high - begin]])
        if self._swapped:
            out[...] = out.view(self._stored).astype(out.dtype)

    def read_rows(self, files: Files, rows: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        if not self._whole:
            for row, place in zip(rows.tolist(), where.tolist(), strict=True):
                self.read_run(files, row, out[place : place + 1])
            return
        begins = rows * self._row_bytes
        at = 0 if len(self._files) == 1 else self._starts.searchsorted(begins, "right") - 1
        offsets = begins + (self._offsets[at] - self._starts[at])
        scatter(files[self._files[0]], offsets, self._row_bytes, out, where)
        if self._swapped:
            out[where] = out[where].view(self._stored).astype(out.dtype)

    def will_need(self, files: Files, first: int, last: int) -> None:
        for file, offset, low, high in self._pieces(first * self._row_bytes, last * self._row_bytes):
            files[file].will_need(offset, high - low)

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield file, offset, first and last byte of the parts of a run of bytes."""
        at = max(0, int(self._starts.searchsorted(begin, "right")) - 1)
        while begin < end:
            start = int(self._starts[at])
            stop = min(end, int(self._starts[at + 1])) if at + 1 < len(self._starts) else end
            yield self._files[at], int(self._offsets[at]) + begin - start, begin, stop
            begin, at = stop, at + 1


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


def _through_memory(file: Descriptor, offsets: np.ndarray, size: int, out: np.ndarray, where: np.ndarray) -> None:
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
