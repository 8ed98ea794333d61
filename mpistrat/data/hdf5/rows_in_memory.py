"""Rows of HDF5 files in memory: all of them, read once for a node."""

from __future__ import annotations

import bisect
import contextlib
import copy
import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrat.data.hdf5.manifest import Manifest
from mpistrat.data.hdf5.reader import FileReader
from mpistrat.memory.buffer_pool import Buffers, new_memory
from mpistrat.memory.node import pages, share_in_pieces

_PIECE_BYTES = 4 << 20
_LINE = 64  # bytes of a cache line


class FilledOnce:
    """Bytes in pieces. The first rank that needs a piece fills it. The other ranks find it filled.

    Ranks exclude each other by a lock of the system for each piece, which it frees if a rank fails, and threads by one
    lock. Pages are reserved when their piece is filled: a lack of memory is an error of `fill`, not a SIGBUS.

    The ranks of ``node`` share the memory, and make the object together; without it, the memory is private. ``part`` is
    where this rank should begin, as a part of the pieces. Raise NoSharedMemoryError on every rank of the node, or
    OSError alone, if memory is short.

    >>> numbers = FilledOnce(8, 2)
    >>> for _ in range(2):
    ...     numbers.fill(1, [(4, 4)], lambda: numbers.memory[4:].__iadd__(1))
    >>> numbers.memory.tolist()
    [0, 0, 0, 0, 1, 1, 1, 1]
    """

    def __init__(self, nbytes: int, pieces: int, node: Any = None):
        self._descriptor: int | None = None
        self._filled: Any = bytearray(pieces)
        self.part = 0.0
        if node is None or node.size == 1:
            memory, start = new_memory(max(1, nbytes))
            self.memory = np.frombuffer(memory, np.uint8, nbytes, start)
            return
        self.part = node.rank / node.size
        self._locks = pages(nbytes)
        self.memory, self._descriptor = share_in_pieces(self, node, nbytes, pieces)
        self._filled = self.memory[self._locks :]

    def fill(self, piece: int, spans: Iterable[tuple[int, int]], load: Callable[[], Any]) -> None:
        """Call ``load`` to fill a piece, the bytes of ``spans`` (start, number), unless a rank of the node has done so.

        Raise OSError if the node has not enough memory.
        """
        with self._locked(piece):
            if not self._filled[piece]:
                if self._descriptor is not None:
                    # A page that the node has no memory for would end the process when it is written to.
                    for start, nbytes in spans:
                        os.posix_fallocate(self._descriptor, start, max(1, nbytes))
                load()
                self._filled[piece] = 1

    @contextlib.contextmanager
    def _locked(self, piece: int) -> Iterator[None]:
        # A lock of the system belongs to the process: its threads would fill a piece twice. One lock for all objects,
        # because the system reports a deadlock if two threads of a process wait for and hold locks of two objects.
        with _filling:
            if self._descriptor is None:
                yield
                return
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, self._locks + piece)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._locks + piece)


_filling = threading.Lock()


def _renew_lock() -> None:
    """Make a new lock in a forked child: a thread of its parent may have held the lock during the fork."""
    global _filling
    _filling = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class RowsInMemory:
    """The rows of a manifest, one array for each column. They are read when rows are first taken.

    The ranks of the communicator ``node`` share the rows, and read them together: then making the object is collective.
    Raise NoSharedMemoryError on every rank of the node if they cannot, OSError if memory for one process is lacking.
    """

    def __init__(self, manifest: Manifest, reader: FileReader, block_rows: int, node: Any = None):
        self._manifest, self._reader = manifest, reader
        self._missing = np.ones(len(manifest.files), bool)
        self._filled = self._by_file = False
        self._offsets: np.ndarray | None = None
        columns, rows = manifest.columns, manifest.rows
        step = block_rows * max(1, round(_PIECE_BYTES / (block_rows * manifest.row_bytes)))
        # File, first row, and one past the last row of each piece, counted in all files.
        self._pieces = [
            (number, first, min(first + step, int(stop)))
            for number, (start, stop) in enumerate(zip(manifest.offsets, manifest.offsets[1:], strict=False))
            for first in range(int(start), int(stop), step)
        ]
        self._shifts = np.zeros(1, np.int64)
        self._begins: list[int] = []
        end = 0
        for column in columns:
            self._begins.append(end)
            end += -(-rows * column.row_bytes // _LINE) * _LINE
        self._shared = FilledOnce(end, len(self._pieces), node)
        self._row_bytes = [column.row_bytes for column in columns]
        self._columns = [
            self._shared.memory[begin : begin + rows * column.row_bytes].view(column.dtype).reshape(rows, *column.shape)
            for begin, column in zip(self._begins, columns, strict=True)
        ]

    def of_files(self, which: Sequence[int]) -> RowsInMemory:
        """Return the rows of some files, in the same memory. Only these files are read for them."""
        part = copy.copy(self)
        part._missing = np.zeros_like(self._missing)
        part._missing[[*which]] = True
        part._filled = False
        offsets = self._manifest.offsets
        part._offsets = np.cumsum([0, *(offsets[i + 1] - offsets[i] for i in which)])
        part._shifts = offsets[[*which]] - part._offsets[:-1]
        return part

    def by_file(self) -> RowsInMemory:
        """Return the rows in the same memory. A file is read when a row of it is first taken."""
        part = copy.copy(self)
        part._missing, part._by_file = self._missing.copy(), True
        return part

    def take(self, rows: np.ndarray, buffers: Buffers) -> list[np.ndarray]:
        """Return these rows of every column, in new arrays.

        Raise DataFileError if a file cannot be read or has changed, and OSError if the node has not enough memory.
        """
        if not self._filled:
            self._fill(self._files_of(rows) if self._by_file else np.flatnonzero(self._missing))
            self._filled = not self._missing.any()
        if self._offsets is not None:
            rows = rows + self._shifts[self._offsets.searchsorted(rows, side="right") - 1]
        out = []
        for values in self._columns:
            taken = buffers.empty((len(rows), *values.shape[1:]), values.dtype)
            out.append(values.take(rows, 0, taken, "clip"))  # "raise" would copy the result once more
        return out

    def _files_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the files of these rows that are missing."""
        files = self._manifest.offsets.searchsorted(rows, side="right") - 1
        return np.unique(files[self._missing[files]])

    def _fill(self, files: np.ndarray) -> None:
        """Read the rows of files, except for those that a rank of the node has read already."""
        numbers: list[int] = []
        for each in files.tolist():
            numbers += range(bisect.bisect_left(self._pieces, (each,)), bisect.bisect_left(self._pieces, (each + 1,)))
        start = int(self._shared.part * len(numbers))
        for number in numbers[start:] + numbers[:start]:
            file, first, stop = self._pieces[number]
            spans = [
                (begin + first * size, (stop - first) * size)
                for begin, size in zip(self._begins, self._row_bytes, strict=True)
            ]
            self._shared.fill(number, spans, partial(self._load, file, first, stop))
        self._missing[files] = False

    def _load(self, file: int, first: int, stop: int) -> None:
        path, record, begin = self._manifest.file(file)
        self._reader.read_run(path, record, first - begin, [values[first:stop] for values in self._columns])
