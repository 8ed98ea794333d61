"""Reader of rows that only HDF5 can read, through h5py."""

from __future__ import annotations

import warnings
import weakref
from functools import partial
from itertools import pairwise
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil

from mpistrat.data.errors import DataFileError
from mpistrat.data.hdf5.chunks import DecodedChunks, by_number, run_of
from mpistrat.data.hdf5.codecs import CODECS, FLETCHER32
from mpistrat.data.hdf5.open_file import SharedFile, open_file
from mpistrat.data.hdf5.raw import KeptOpen
from mpistrat.data.hdf5.records import Column, FileRecord, ThroughHdf5
from mpistrat.data.rows.spec import native
from mpistrat.memory.made_once import Chunk, in_turn
from mpistrat.process.own_files import level_of_program

_MOST_CACHE = 64 << 20
_CACHE_SLOTS = 521


class Hdf5Rows:
    """Reader by HDF5, for one thread at a time. Chunks of which some rows are read are kept in ``decoded``."""

    def __init__(self, most_open: int, decoded: DecodedChunks):
        self._open, self._decoded = KeptOpen[_OpenFile](most_open), decoded

    def read(
        self,
        path: str,
        record: FileRecord,
        number: int,
        rows: np.ndarray,
        out: np.ndarray,
        where: np.ndarray,
        version: Any,
    ) -> None:
        """Read ascending rows of a column to the places ``where`` of ``out``. ``version`` changes when a file does."""
        file = self._open.opened(path, partial(_OpenFile, path))
        try:
            if record.columns[number].decoded:
                file.column(record, number).read_chunks(rows, out, where, (path, number, version), self._decoded)
            else:
                with phil:  # no thread may close a handle meanwhile
                    file.column(record, number).read(rows, out, where)
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
        self.close = weakref.finalize(self, self._file.close)
        self.close.atexit = False
        self._columns: dict[int, _OpenColumn] = {}

    def column(self, record: FileRecord, number: int) -> _OpenColumn:
        if number in self._columns and self._columns[number].is_lost(self._file):
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
            access.set_chunk_cache(_CACHE_SLOTS, cache, 1.0)
        self._id = h5py.h5d.open(file.id, column.name.encode(), access)
        self._space = self._id.get_space()
        self._stored, *inner = self._id.shape
        assert isinstance(column.layout, ThroughHdf5)
        self._layout = column.layout
        self.rows = self._stored + column.layout.lacking
        self._zeros = (0,) * len(inner)
        self._inner = inner
        self._type = h5py.h5t.py_create(native(h5py.Dataset(self._id).dtype))
        never = self._id.get_create_plist().get_fill_time() == h5py.h5d.FILL_TIME_NEVER
        self._leaves_memory = never and not column.dtype.hasobject

    def is_lost(self, file: SharedFile) -> bool:
        """Return whether another handle was closed to which HDF5's type of the dataset may refer."""
        return bool(self._others) and bool(file) and not self._others <= file.others()

    def read(self, rows: np.ndarray, out: np.ndarray, where: np.ndarray) -> None:
        """Read ascending rows to the places ``where`` of ``out``. Consecutive rows are read in one call."""
        new = np.diff(rows) != 1
        if self.column.filtered:
            # Reading the rows between two rows of a chunk is free, because the chunk is decoded anyway.
            new &= np.diff(rows // self.column.chunk_rows) != 0
        for start, stop in pairwise([0, *(np.flatnonzero(new) + 1).tolist(), len(rows)]):
            first, last, to = int(rows[start]), int(rows[stop - 1]) + 1, where[start:stop]
            if last - first == len(to) and isinstance(run_of(to), slice):
                self._read_run(first, last, out[to[0] : to[0] + len(to)])
            else:
                span = np.empty((last - first, *self.column.shape), out.dtype)
                self._read_run(first, last, span)
                out[to] = span[rows[start:stop] - first]

    def read_chunks(
        self, rows: np.ndarray, out: np.ndarray, where: np.ndarray, key: Any, decoded: DecodedChunks
    ) -> None:
        """Read ascending rows, each at most once, to the places ``where`` of ``out``, in whole chunks."""
        size = self.column.chunk_rows
        parts = []
        for number, part in by_number(rows // size):
            wanted, to = part.stop - part.start, where[part]
            first = number * size
            count = min(size, self.rows - first)
            if wanted == count and isinstance(run_of(to), slice):
                self._read_run(first, first + count, out[to[0] : to[0] + count])
                continue
            make = partial(self._chunk, first, count, out.dtype)
            use = partial(_copy, out, to, rows[part] - first)
            parts.append(Chunk((key, number), count * self.column.row_bytes, wanted, count - wanted, make, use))
        decoded.each(parts, in_turn)

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
        if self._leaves_memory:  # HDF5, as it is where no chunk was written. h5py gives zeros, too
            out[: last - first] = np.zeros((), out.dtype)
        count = (last - first, *self._inner)
        self._space.select_hyperslab((first, *self._zeros), count)
        self._id.read(h5py.h5s.create_simple(count), self._space, out, self._type)


def _varies_inside(dtype: np.dtype) -> bool:
    """Return whether values of variable length lie inside other values."""
    inner = dict(dtype.metadata or {}).get("vlen", object)
    return dtype.hasobject and (dtype.kind != "O" or (isinstance(inner, np.dtype) and inner.hasobject))


def _copy(out: np.ndarray, where: np.ndarray, rows: np.ndarray, chunk: np.ndarray) -> None:
    out[where] = chunk.view(out.dtype).reshape(-1, *out.shape[1:])[rows]
