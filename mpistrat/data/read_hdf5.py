"""Rows out of HDF5 files: the only place that reads them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence

import h5py
import numpy as np

from mpistrat.data.describe_hdf5 import Column, FileRecord, open_file
from mpistrat.data.errors import ChecksumError, DataFileError

_MOST_CACHE = 64 << 20
_CACHE_SLOTS = 521


class Reader:
    """Reads rows, keeping the files that were used last open.

    Open files belong to the process that opened them: after a fork the child opens its own. One thread
    reads at a time, which costs nothing as HDF5 itself does not allow more.
    """

    def __init__(self, most_open: int = 16):
        self._most_open = most_open
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def read(self, path: str, record: FileRecord, rows: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """The rows of a file, one array in ``out`` for each column.

        ``rows`` ascend, and may repeat.

        Raises
        ------
        DataFileError
            If the file is not the one that was described, or cannot be read.
        """
        if os.getpid() != self._pid:
            self._open, self._pid, self._lock = OrderedDict(), os.getpid(), threading.Lock()
        with self._lock:
            file = self._open.get(path)
            if file is None:
                while len(self._open) >= self._most_open:
                    self._open.popitem(last=False)[1].close()
                file = self._open[path] = _OpenFile(path, record)
            self._open.move_to_end(path)
            file.read(rows, out)

    def close(self) -> None:
        """Close all files; they open again when needed."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def __reduce__(self) -> tuple[type[Reader], tuple[int]]:
        return Reader, (self._most_open,)


class _OpenFile:
    def __init__(self, path: str, record: FileRecord):
        self._path = path
        self._record = record
        self._file = open_file(path)
        self._descriptor = self._file.id.get_vfd_handle()
        self._check_size()
        self._columns = [_OpenColumn(self._file, column) for column in record.columns]
        for each in self._columns:
            if each.rows != record.rows:
                raise DataFileError(
                    f"file {path!r}, dataset {each.column.name!r}: it had {record.rows} rows when it was "
                    f"described and has {each.rows} now; fix: leave data files alone while they are read"
                )

    def read(self, rows: np.ndarray, out: Sequence[np.ndarray]) -> None:
        for column, values in zip(self._columns, out, strict=True):
            try:
                column.read(rows, values)
            except (OSError, RuntimeError) as error:
                self._check_size()
                kind = ChecksumError if column.column.checksum else DataFileError
                raise kind(
                    f"file {self._path!r}, dataset {column.column.name!r}: rows {rows[0]} to {rows[-1]} "
                    f"cannot be read ({error}); fix: the file is damaged, copy or write it again"
                ) from error
        # HDF5 gives zeros for what was cut off behind its back.
        self._check_size()

    def close(self) -> None:
        self._columns = []
        self._file.close()

    def _check_size(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if size != self._record.size:
            change = "truncated" if size < self._record.size else "written to"
            raise DataFileError(
                f"file {self._path!r}: it was {change} after it was described ({self._record.size} bytes "
                f"then, {size} bytes now); fix: leave data files alone while they are read, write it again"
            )


class _OpenColumn:
    def __init__(self, file: h5py.File, column: Column):
        self.column = column
        access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
        if column.chunk_rows:
            # A cache of chunks helps only where a chunk must be decoded to get at a row.
            cache = (
                max(column.chunk_bytes, min(4 * column.chunk_bytes, _MOST_CACHE)) if column.filtered else 0
            )
            access.set_chunk_cache(_CACHE_SLOTS, cache, 1.0)
        self._id = h5py.h5d.open(file.id, column.name.encode(), access)
        self._space = self._id.get_space()
        self.rows, *inner = self._id.shape
        self._zeros = (0,) * len(inner)
        self._inner = inner
        dtype = h5py.Dataset(self._id).dtype
        self._type = h5py.h5t.py_create(dtype if dtype.isnative else dtype.newbyteorder("="))

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Ascending rows, consecutive ones at once."""
        gaps = np.diff(rows) != 1
        new = gaps
        if self.column.filtered:
            # Rows between two rows of a chunk cost nothing: the chunk is decoded anyway.
            new = gaps & (np.diff(rows // self.column.chunk_rows) != 0)
        cuts = np.flatnonzero(new) + 1
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(rows)], strict=True):
            first, last = int(rows[start]), int(rows[stop - 1]) + 1
            if not gaps[start : stop - 1].any():
                self._read_run(first, last, out[start:stop])
            else:
                span = np.empty((last - first, *self.column.shape), out.dtype)
                self._read_run(first, last, span)
                out[start:stop] = span[rows[start:stop] - first]

    def _read_run(self, first: int, last: int, out: np.ndarray) -> None:
        count = (last - first, *self._inner)
        self._space.select_hyperslab((first, *self._zeros), count)
        self._id.read(h5py.h5s.create_simple(count), self._space, out, self._type)
