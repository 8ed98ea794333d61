"""Reader of rows stored as in memory, by open files that are read at any offset, without HDF5."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.data.errors import DataFileError
from mpistrat.data.hdf5.records import Chunked, Column, ColumnMajor, Contiguous
from mpistrat.data.rows.spec import native

_MOST_AT_ONCE = 1 << 30  # Linux reads up to 2 GiB in a call
_MOST_PIECES = 1024  # IOV_MAX of Linux


class Descriptor:
    """One file, open for reading."""

    __slots__ = ("_fd", "_mtime_ns", "_path", "_size")

    def __init__(self, path: str, size: int):
        self._fd = -1  # for __del__, if the file cannot be opened
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise DataFileError.of_file(path, "it can no longer be found; fix: bring it back") from None
        except OSError as error:
            raise DataFileError.of_file(path, f"it cannot be opened ({error}); fix: see the error") from error
        self._path, self._size = path, size
        self._mtime_ns = -1  # not checked yet

    def check(self, same: Callable[[str, int], bool]) -> None:
        """Check that the size of the file is unchanged; raise DataFileError if not.

        If the time of writing changed, ``same(path, mtime_ns)`` decides whether the file still has the same rows.
        """
        if self._fd < 0:  # closed to make room for other files; was checked when it was opened
            return
        status = os.fstat(self._fd)
        if status.st_size != self._size or (
            status.st_mtime_ns != self._mtime_ns and not same(self._path, status.st_mtime_ns)
        ):
            raise changed(self._path, self._size, status.st_size)
        self._mtime_ns = status.st_mtime_ns

    @property
    def version(self) -> tuple[str, int]:
        """What changes when the file is written to: its path, and its time of writing now, or when it was closed."""
        return self._path, self._mtime_ns if self._fd < 0 else os.fstat(self._fd).st_mtime_ns

    @property
    def checked(self) -> bool:
        """Whether `check` has passed since the file was opened."""
        return self._mtime_ns >= 0

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """Fill memory with the bytes from ``offset`` on. Raise DataFileError if the file has fewer bytes."""
        # The usual case. After a short read, all is read again below, in pieces that the system takes.
        if len(into) == 1 and os.preadv(self._fd, into, offset) == len(into[0]):
            return
        buffers = [buffer for view in into for buffer in _split(view)]
        start = 0
        while start < len(buffers):
            count = os.preadv(self._fd, buffers[start : start + _MOST_PIECES], offset)
            if count == 0:  # the end of the file
                wanted = offset + sum(map(len, buffers[start:]))
                size = os.fstat(self._fd).st_size
                if size != self._size:
                    raise changed(self._path, self._size, size)
                raise DataFileError.of_file(
                    self._path,
                    f"it is truncated, with {size} bytes instead of at least {wanted}; fix: copy or write it again",
                )
            offset += count
            while start < len(buffers) and count >= len(buffers[start]):
                count -= len(buffers[start])
                start += 1
            if count:  # the read ended inside of this buffer
                buffers[start] = buffers[start][count:]

    def read_each(self, offsets: Sequence[int], size: int, into: memoryview, positions: Sequence[int]) -> None:
        """Read ``size`` bytes at each of these offsets to these positions in memory. Raise DataFileError as `read`."""
        read, fd = os.preadv, self._fd  # looked up once for thousands of rows
        for offset, position in zip(offsets, positions, strict=True):
            row = into[position : position + size]
            if read(fd, [row], offset) != size:
                self.read(offset, [row])

    def will_need(self, offset: int, size: int) -> None:
        """Ask the system to read these bytes ahead, where it supports that."""
        # Do not test the page cache first: with RWF_NOWAIT Linux starts its own read-ahead, which is slower in all.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            self.close()


class Files(Protocol):
    """The open files of a dataset, by number."""

    def __getitem__(self, number: int) -> Descriptor:
        """Return an open file. It may be closed when another file is requested."""


_Open = TypeVar("_Open", bound=Any)  # has a method or attribute `close`


class OpenFileCache(OrderedDict[str, _Open]):
    """A bounded number of open files by path. The least recently used one is closed first."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def opened(self, path: str, open_it: Callable[[], _Open]) -> _Open:
        """Return a file; open it if necessary."""
        if path not in self:
            while len(self) >= self._most:
                self.popitem(last=False)[1].close()
            self[path] = open_it()
        self.move_to_end(path)
        return self[path]


def changed(path: str, then: int, now: int) -> DataFileError:
    """Return the error for a file that has changed."""
    change = "truncated" if now < then else "written to"
    sizes = f" ({then} bytes then, {now} bytes now)" if now != then else ""
    return DataFileError.of_file(
        path,
        f"it was {change} after it was described{sizes}; "
        "fix: do not change data files while they are read, and write this one again",
    )


def _split(view: memoryview) -> list[memoryview]:
    if len(view) <= _MOST_AT_ONCE:
        return [view] if len(view) else []
    return [view[i : i + _MOST_AT_ONCE] for i in range(0, len(view), _MOST_AT_ONCE)]


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
            # The bytes were read to where the converted numbers go.
            out[...] = out.view(self._stored).astype(out.dtype)

    def read_rows(self, files: Files, rows: np.ndarray, out: np.ndarray, indices: np.ndarray) -> None:
        if not self._whole:
            for row, position in zip(rows.tolist(), indices.tolist(), strict=True):
                self.read_run(files, row, out[position : position + 1])
            return
        begins = rows * self._row_bytes
        at = 0 if len(self._files) == 1 else self._starts.searchsorted(begins, "right") - 1
        offsets = begins + (self._offsets[at] - self._starts[at])
        scatter(files[self._files[0]], offsets, self._row_bytes, out, indices)
        if self._swapped:
            out[indices] = out[indices].view(self._stored).astype(out.dtype)

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


class ColumnMajorRows:
    """Reader of rows of an array in Fortran order: one read for each value of a row, of all rows that are near."""

    def __init__(self, layout: ColumnMajor, column: Column):
        self._layout, self._shape, self._stored = layout, column.shape, column.stored
        # So many rows share one read for each value, together with the rows between them.
        self._most = max(1, min(_GAP // column.stored.itemsize, _MOST_OF_GAPS // column.row_bytes))

    def read_run(self, files: Files, first: int, out: np.ndarray) -> None:
        values = np.empty((math.prod(self._shape), len(out)), self._stored)
        size, step = self._stored.itemsize, self._layout.rows * self._stored.itemsize
        for number, line in enumerate(as_bytes(values).reshape(len(values), -1)):
            files[0].read(self._layout.offset + number * step + first * size, [line.data])
        out[...] = values.reshape(*self._shape[::-1], len(out)).T

    def read_rows(self, files: Files, rows: np.ndarray, out: np.ndarray, indices: np.ndarray) -> None:
        start = 0
        while start < len(rows):
            stop = int(rows.searchsorted(rows[start] + self._most))
            near = rows[start:stop] - rows[start]
            span = np.empty((int(near[-1]) + 1, *self._shape), out.dtype)
            self.read_run(files, int(rows[start]), span)
            out[indices[start:stop]] = span[near]
            start = stop

    def will_need(self, files: Files, first: int, last: int) -> None:
        """Do nothing: the rows lie in too many pieces."""


def scatter(file: Descriptor, offsets: np.ndarray, size: int, out: np.ndarray, indices: np.ndarray) -> None:
    """Read rows of ``size`` bytes at these offsets to ``out[indices]``. Near rows are read in one call."""
    gaps = offsets[1:] - offsets[:-1] - size
    view = as_bytes(out).data
    near = np.count_nonzero(gaps <= _GAP)
    if not near or (size >= _GAP and near < len(gaps) * _WORTH_MERGING):
        file.read_each(offsets.tolist(), size, view, (indices * size).tolist())
        return
    if gaps.min() < 0:  # chunks may have any order in the file
        order = np.argsort(offsets, kind="stable")
        offsets, indices = offsets[order], indices[order]
        gaps = offsets[1:] - offsets[:-1] - size
    cuts = (np.flatnonzero(gaps > _GAP) + 1).tolist()
    if size < _SMALL_ROW:
        for start, stop in pairwise([0, *cuts, len(indices)]):
            _read_buffered(file, offsets[start:stop], size, out, indices[start:stop])
        return
    # Rows that follow each other both in the file and in memory become one piece.
    new = np.flatnonzero((gaps != 0) | (indices[1:] != indices[:-1] + 1)) + 1
    firsts, lasts = np.append(0, new), np.append(new - 1, len(indices) - 1)
    begins, ends = (indices[firsts] * size).tolist(), ((indices[lasts] + 1) * size).tolist()
    between, at = gaps[lasts[:-1]].tolist(), offsets[firsts].tolist()
    for start, stop in pairwise([0, *firsts.searchsorted(cuts).tolist(), len(begins)]):
        pieces = [view[begins[start] : ends[start]]]
        for i in range(start + 1, stop):
            if between[i - 1]:
                pieces.append(memoryview(bytearray(between[i - 1])))
            pieces.append(view[begins[i] : ends[i]])
        file.read(at[start], pieces)


def _read_buffered(file: Descriptor, offsets: np.ndarray, size: int, out: np.ndarray, indices: np.ndarray) -> None:
    """Read small rows through a buffer, together with all bytes between them."""
    flat = out.reshape(len(out), -1).view(np.uint8).reshape(len(out), size)
    start = 0
    while start < len(offsets):
        stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + _MOST_OF_GAPS)))
        span = np.empty(int(offsets[stop - 1] - offsets[start]) + size, np.uint8)
        file.read(int(offsets[start]), [span.data])
        windows = np.lib.stride_tricks.sliding_window_view(span, size)
        flat[indices[start:stop]] = windows[offsets[start:stop] - offsets[start]]
        start = stop
