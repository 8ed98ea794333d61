"""The rows of HDF5 files, read directly where their place is known, and through h5py otherwise."""

from __future__ import annotations

import os
import resource
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import h5py
import numpy as np
from h5py._objects import phil

from mpistrat.data.errors import ChecksumError, DataFileError
from mpistrat.data.hdf5 import records
from mpistrat.data.hdf5.chunks import CODECS, FLETCHER32, ChunkedRows, DecodedChunks, by_number, run_of
from mpistrat.data.hdf5.describe import describe
from mpistrat.data.hdf5.open_file import SharedFile, open_file
from mpistrat.data.hdf5.raw import ColumnMajorRows, Descriptor, Files, OpenFileCache, RawRows
from mpistrat.data.hdf5.records import Column, FileRecord, ThroughHdf5
from mpistrat.data.rows.blocks import MOST_DECODED
from mpistrat.data.rows.spec import native
from mpistrat.memory.made_once import Chunk, MadeOnce, in_turn
from mpistrat.process.cache import Cache
from mpistrat.process.own_files import level_of_program

_MOST_CACHE = 64 << 20
_CACHE_SLOTS = 521  # HDF5's default


class Hdf5Rows:
    """Reader through HDF5, for one thread at a time. Chunks of which some rows are read are kept in ``decoded``."""

    def __init__(self, most_open: int, decoded: DecodedChunks):
        self._open, self._decoded = OpenFileCache[_OpenFile](most_open), decoded

    def read(
        self,
        path: str,
        record: FileRecord,
        number: int,
        rows: np.ndarray,
        out: np.ndarray,
        indices: np.ndarray,
        version: Any,
    ) -> None:
        """Read ascending rows of a column to ``out[indices]``. ``version`` changes when a file does."""
        file = self._open.opened(path, partial(_OpenFile, path))
        try:
            if record.columns[number].decoded:
                file.column(record, number).read_chunks(rows, out, indices, (path, number, version), self._decoded)
            else:
                with phil:  # no thread may close a handle meanwhile
                    file.column(record, number).read(rows, out, indices)
        except (OSError, RuntimeError) as error:
            if record.columns[number].checksum:
                with phil:
                    file.column(record, number).check_checksums(rows)
            raise OSError(str(error)) from error


class _OpenFile:
    def __init__(self, path: str):
        self._path = path
        self._open()

    def _open(self) -> None:
        self._file = open_file(self._path)
        # Closes the file once: by a call, or when this object is gone.
        self.close = weakref.finalize(self, self._file.close)
        self.close.atexit = False
        self._columns: dict[int, _OpenColumn] = {}

    def column(self, record: FileRecord, number: int) -> _OpenColumn:
        if number in self._columns and self._columns[number].is_lost(self._file):
            # HDF5 crashes in types of a handle that is closed (h5py issue 2920), so open the file anew.
            self._file.close_for_all()
        if not self._file:
            self.close()
            self._open()
        if number not in self._columns:
            column = _OpenColumn(self._file, record.columns[number])
            if column.rows != record.rows:
                raise DataFileError(
                    f"file {self._path!r}, dataset {column.column.name!r}: it had {record.rows} rows when it "
                    f"was described and has {column.rows} now; fix: do not change data files while they are read"
                )
            self._columns[number] = column
        return self._columns[number]


class _OpenColumn:
    def __init__(self, file: SharedFile, column: Column):
        self.column = column
        self._others = file.others() if _varies_inside(column.stored) else frozenset()
        file.outlives_others = file.outlives_others or _varies_inside(column.stored)
        if self._others:
            warnings.warn(
                f"the program has file {file.filename!r} open by h5py, too, while dataset {column.name!r} is read, "
                "whose rows have members of variable length. HDF5 crashes in such rows if another of two handles was "
                "closed first: close the file before its rows are read",
                RuntimeWarning,
                stacklevel=level_of_program(),
            )
        access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
        if column.chunk_rows:
            # HDF5's cache of chunks helps only where chunks must be decoded and `DecodedChunks` does not keep them.
            alone = column.filtered and not column.decoded
            cache = max(column.chunk_bytes, min(4 * column.chunk_bytes, _MOST_CACHE)) if alone else 0
            access.set_chunk_cache(_CACHE_SLOTS, cache, 1.0)  # 1.0: drop chunks first that were read as a whole
        self._id = h5py.h5d.open(file.id, column.name.encode(), access)
        self._space = self._id.get_space()
        self._stored, *inner = self._id.shape
        assert isinstance(column.layout, ThroughHdf5)
        self._layout = column.layout
        self.rows = self._stored + column.layout.lacking
        self._zeros = (0,) * len(inner)
        self._inner = inner
        self._type = h5py.h5t.py_create(native(h5py.Dataset(self._id).dtype))  # HDF5 swaps bytes while it reads
        never = self._id.get_create_plist().get_fill_time() == h5py.h5d.FILL_TIME_NEVER
        self._leaves_memory = never and not column.dtype.hasobject

    def is_lost(self, file: SharedFile) -> bool:
        """Return whether another handle was closed to which HDF5's type of the dataset may refer."""
        return bool(self._others) and bool(file) and not self._others <= file.others()

    def read(self, rows: np.ndarray, out: np.ndarray, indices: np.ndarray) -> None:
        """Read ascending rows to ``out[indices]``. Consecutive rows are read in one call."""
        new = np.diff(rows) != 1
        if self.column.filtered:
            # Reading the rows between two rows of a chunk is free, because the chunk is decoded anyway.
            new &= np.diff(rows // self.column.chunk_rows) != 0
        for start, stop in pairwise([0, *(np.flatnonzero(new) + 1).tolist(), len(rows)]):
            first, last, to = int(rows[start]), int(rows[stop - 1]) + 1, indices[start:stop]
            if last - first == len(to) and isinstance(run_of(to), slice):
                self._read_run(first, last, out[to[0] : to[0] + len(to)])
            else:
                span = np.empty((last - first, *self.column.shape), out.dtype)
                self._read_run(first, last, span)
                out[to] = span[rows[start:stop] - first]

    def read_chunks(
        self, rows: np.ndarray, out: np.ndarray, indices: np.ndarray, key: Any, decoded: DecodedChunks
    ) -> None:
        """Read ascending rows, each at most once, to ``out[indices]``, in whole chunks."""
        size = self.column.chunk_rows
        parts = []
        for number, part in by_number(rows // size):
            wanted, to = part.stop - part.start, indices[part]
            first = number * size
            count = min(size, self.rows - first)
            if wanted == count and isinstance(run_of(to), slice):
                self._read_run(first, first + count, out[to[0] : to[0] + count])
                continue
            make = partial(self._chunk, first, count, out.dtype)
            use = partial(_copy, out, to, rows[part] - first)
            parts.append(Chunk((key, number), count * self.column.row_bytes, wanted, count - wanted, make, use))
        decoded.use_all(parts, in_turn)

    def check_checksums(self, rows: np.ndarray) -> None:
        """Raise ChecksumError if a chunk with some of these rows contradicts a checksum that was made of it last."""
        # HDF5 says of any error that a filter failed, not which one. Filters may fail for other reasons than damage.
        plist, numbers = self._id.get_create_plist(), {*(rows // self.column.chunk_rows).tolist()}
        last = plist.get_nfilters() - 1
        for corner in (self._id.get_chunk_info(i).chunk_offset for i in range(self._id.get_num_chunks())):
            if corner[0] // self.column.chunk_rows in numbers and plist.get_filter(last)[0] == FLETCHER32:
                mask, raw = self._id.read_direct_chunk(corner)
                if not mask >> last & 1:
                    CODECS[FLETCHER32](raw, (), 0, None)

    def _chunk(self, first: int, count: int, dtype: np.dtype, memory: np.ndarray | None) -> np.ndarray:
        if memory is None:
            memory = np.empty(count * self.column.row_bytes, np.uint8)
        rows = memory.view(dtype).reshape(count, *self.column.shape)
        self._read_run(first, first + count, rows)
        return rows

    def _read_run(self, first: int, last: int, out: np.ndarray) -> None:
        if last > self._stored:
            fill = self._layout.fill[0] if len(self._layout.fill) else h5py.Dataset(self._id).fillvalue
            out[max(self._stored - first, 0) :] = fill
            last = self._stored
            if first >= last:
                return
        if self._leaves_memory:  # HDF5, where no chunk was written. h5py gives zeros there, too
            out[: last - first] = np.zeros((), out.dtype)
        count = (last - first, *self._inner)
        self._space.select_hyperslab((first, *self._zeros), count)
        self._id.read(h5py.h5s.create_simple(count), self._space, out, self._type)


def _varies_inside(dtype: np.dtype) -> bool:
    """Return whether values of variable length lie inside other values."""
    inner = dict(dtype.metadata or {}).get("vlen", object)
    return dtype.hasobject and (dtype.kind != "O" or (isinstance(inner, np.dtype) and inner.hasobject))


def _copy(out: np.ndarray, indices: np.ndarray, rows: np.ndarray, chunk: np.ndarray) -> None:
    out[indices] = chunk.view(out.dtype).reshape(-1, *out.shape[1:])[rows]


_LIMIT, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
_MOST_OPEN = 512 if _LIMIT < 0 else min(512, _LIMIT // 2)  # batches may have rows of 256 files
_LAYOUTS_KEPT = 1024


class KeepingReader:
    """Base of readers that keep up to ``most_decoded`` bytes of decoded chunks. One thread reads at a time.

    Open files belong to the process that opened them: after a fork the child begins anew.
    """

    fewest_kept = 2

    def __init__(self, most_decoded: int, describe: Callable[[str, Sequence[str]], records.FileRecord]):
        self._most_decoded, self._describe = most_decoded, describe
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._decoded = DecodedChunks(self._most_decoded, self.fewest_kept)
        # By path, the last time of writing after which the description was the same.
        self._written: dict[str, int] = {}

    def _thread_lock(self) -> threading.Lock:
        """Return a lock that lets one thread of this process read."""
        # After a fork, the lock may belong to a thread that the child does not have.
        if os.getpid() != self._pid:
            self._start()
        return self._lock

    def share(self, shared: MadeOnce) -> None:
        """Let the ranks of the node keep decoded chunks for each other. A forked child decodes its own."""
        self._decoded.shared = shared

    def is_as_described(self, name: str, path: str, record: records.FileRecord, mtime_ns: int) -> bool:
        """Return whether a file with another time of writing still has the described contents.

        The time differs after the file was written to, or if clocks differ between nodes.
        """
        if self._written.get(name) != mtime_ns:
            try:
                current = self._describe(path, [column.name for column in record.columns])
            except (RuntimeError, ValueError):
                return False
            if records.to_json(records.without_times(current)) != records.to_json(records.without_times(record)):
                return False
            self._written[name] = mtime_ns
            self._decoded.clear()  # the rows may be others, though the description is the same
        return True


class FileReader(KeepingReader):
    """Reader of rows that keeps ``most_open`` files open for direct reads, and at most 16 through HDF5."""

    def __init__(
        self,
        most_open: int = _MOST_OPEN,
        most_decoded: int = MOST_DECODED,
        describe: Callable[[str, Sequence[str]], records.FileRecord] = describe,
    ):
        self._most_open = most_open
        super().__init__(most_decoded, describe)

    def _start(self) -> None:
        super()._start()
        self._descriptors = OpenFileCache[Descriptor](self._most_open)
        self._through_h5py = Hdf5Rows(min(self._most_open, 16), self._decoded)
        self._rows = Cache[tuple[str, int], RowReader](_LAYOUTS_KEPT)

    close = _start

    def read_run(self, path: str, record: records.FileRecord, first: int, out: Sequence[np.ndarray]) -> None:
        """Read rows of a file from ``first`` on to an array for each column. Raise DataFileError if it changed."""
        with self._thread_lock():
            for number, values in enumerate(out):
                with _Files(self, path, record, number, (first, first + len(values) - 1)) as files:
                    if files.direct:
                        self._rows_of(path, record, number).read_run(files, first, values)
                    else:
                        indices = np.arange(len(values))
                        rows = first + indices
                        self._through_h5py.read(path, record, number, rows, values, indices, files.version)

    def read_rows(
        self, path: str, record: records.FileRecord, rows: np.ndarray, out: Sequence[np.ndarray], indices: np.ndarray
    ) -> None:
        """Read ascending rows, each at most once, as `read_run`: row ``rows[i]`` to ``indices[i]`` of each column."""
        with self._thread_lock():
            for number, values in enumerate(out):
                with _Files(self, path, record, number, (rows[0], rows[-1])) as files:
                    if files.direct:
                        self._rows_of(path, record, number).read_rows(files, rows, values, indices)
                    else:
                        self._through_h5py.read(path, record, number, rows, values, indices, files.version)

    def will_need(self, path: str, record: records.FileRecord, first: int, last: int) -> None:
        """Start read-ahead of the rows from ``first`` up to ``last``, for columns that are read directly."""
        with self._thread_lock():
            for number, column in enumerate(record.columns):
                if not isinstance(column.layout, records.ThroughHdf5):
                    files = _Files(self, path, record, number)
                    self._rows_of(path, record, number).will_need(files, first, last)

    def _rows_of(self, path: str, record: records.FileRecord, number: int) -> RowReader:
        key = path, number
        if key not in self._rows:
            column = record.columns[number]
            self._rows.keep(key, reader_of(column, column.layout, record.rows, key, self._decoded))
        return self._rows[key]

    def __reduce__(self) -> tuple[type[FileReader], tuple[Any, ...]]:
        return type(self), (self._most_open, self._most_decoded, self._describe)


class _Files:
    """The files of one column while some rows are read. A file is opened when it is requested by its number."""

    def __init__(
        self, reader: FileReader, path: str, record: records.FileRecord, number: int, rows: tuple[int, int] = (0, 0)
    ):
        self._reader = reader
        self._path = path
        self._record = record
        self._column = record.columns[number]
        self._rows = rows
        self._used: dict[int, Descriptor] = {}
        self.direct = not isinstance(self._column.layout, records.ThroughHdf5)

    def __getitem__(self, number: int) -> Descriptor:
        name, size, _ = self._described(number)
        try:
            descriptor = self._reader._descriptors.opened(name, partial(Descriptor, name, size))
        except DataFileError as error:
            raise error.in_dataset(self._column.name) from error.__cause__
        # Opened now, or again after its place was needed for others.
        if descriptor is not self._used.get(number):
            self._used[number] = descriptor
            if not descriptor.checked:
                self._check(number)
        return descriptor

    def __enter__(self) -> _Files:
        if not self.direct:
            self._check_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            if self.direct:
                # After reading, too: a file that was written to meanwhile gave rows of both versions.
                for number in self._used:
                    self._check(number)
            else:
                self._check_all()
        elif isinstance(error, ChecksumError):
            raise ChecksumError(self._unreadable(error)) from error
        elif isinstance(error, DataFileError):
            raise error.in_dataset(self._column.name) from error.__cause__
        elif isinstance(error, Exception) and not isinstance(error, MemoryError):
            self._check_all()  # h5py answers damage with errors of any kind
            raise DataFileError(self._unreadable(error)) from error

    @property
    def version(self) -> tuple[Any, ...]:
        """What changes when one of the files that were requested is written to."""
        return tuple(file.version for file in self._used.values())

    def _check_all(self) -> None:
        for number in range(len(self._column.others) + 1):
            self[number]
            self._check(number)

    def _unreadable(self, error: BaseException) -> str:
        fix = "see the error, and copy or write the file again if it is damaged"
        if isinstance(error, ChecksumError):
            fix = "the file is damaged, copy or write it again"
        return (
            f"file {self._path!r}, dataset {self._column.name!r}: rows {self._rows[0]} to {self._rows[1]} cannot "
            f"be read ({error}); fix: {fix}"
        )

    def _check(self, number: int) -> None:
        try:
            self._used[number].check(self._is_same)
        except DataFileError as error:
            raise error.in_dataset(self._column.name) from error.__cause__

    def _is_same(self, name: str, mtime_ns: int) -> bool:
        described = {self._described(number)[0]: self._described(number)[2] for number in self._used}
        return described[name] == mtime_ns or self._reader.is_as_described(name, self._path, self._record, mtime_ns)

    def _described(self, number: int) -> tuple[str, int, int]:
        if number == 0:
            return self._path, self._record.size, self._record.mtime_ns
        other = self._column.others[number - 1]
        return records.joined_path(self._path, other.path), other.size, other.mtime_ns


class RowReader(Protocol):
    """Reader of the rows of one dataset. A new layout is a new class like this and a line in `reader_of`."""

    def read_run(self, files: Files, first: int, out: np.ndarray) -> None:
        """Read rows from ``first`` on, as many as ``out`` has."""

    def read_rows(self, files: Files, rows: np.ndarray, out: np.ndarray, indices: np.ndarray) -> None:
        """Read ascending rows, each at most once, to ``out[indices]``."""

    def will_need(self, files: Files, first: int, last: int) -> None:
        """Start read-ahead of the rows from ``first`` up to ``last``."""


def reader_of(column: records.Column, layout: records.Layout, rows: int, key: Any, decoded: DecodedChunks) -> RowReader:
    """Return the reader of ``rows`` rows of a column, or of a part of it. ``key`` identifies them in the cache."""
    if isinstance(layout, records.ColumnMajor):
        return ColumnMajorRows(layout, column)
    if isinstance(layout, records.Joined):
        return JoinedRows(column, layout, key, decoded)
    if isinstance(layout, records.Chunked) and (layout.filters or layout.chunk[1:] != column.shape):
        return ChunkedRows(layout, rows, column.shape, column.stored, key, decoded)
    assert isinstance(layout, (records.Chunked, records.Contiguous))
    return RawRows(layout, column)


class JoinedRows:
    """Reader of a virtual dataset: rows of several layouts, one after another."""

    def __init__(self, column: records.Column, layout: records.Joined, key: Any, decoded: DecodedChunks):
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

    def read_rows(self, files: Files, rows: np.ndarray, out: np.ndarray, indices: np.ndarray) -> None:
        cuts = np.searchsorted(rows, self._ends)
        start = int(np.searchsorted(rows, self._firsts[0]))
        for i in np.flatnonzero(np.diff(cuts, prepend=start)).tolist():
            stop = int(cuts[i])
            self._parts[i].read_rows(files, rows[start:stop] + self._shifts[i], out, indices[start:stop])
            start = stop

    def will_need(self, files: Files, first: int, last: int) -> None:
        for i in self._touched(first, last):
            low, high = max(first, int(self._firsts[i])), min(last, int(self._ends[i]))
            self._parts[i].will_need(files, low + int(self._shifts[i]), high + int(self._shifts[i]))

    def _touched(self, first: int, last: int) -> range:
        return range(int(np.searchsorted(self._ends, first, side="right")), int(np.searchsorted(self._firsts, last)))
