"""Files for h5py that never give HDF5 an error: new ones on the disk, and ones in memory.

HDF5 keeps chunks and its index in memory. If these cannot be written later, as the disk is full, it crashes, or
keeps the file open until the program ends. Here such bytes stay in memory, HDF5 closes the file in peace, and the
error is raised afterwards.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import h5py

from mpistrat.process.files import write_all
from mpistrat.process.waiting import begin_call

_Result = TypeVar("_Result")


class Hdf5Output:
    """A new HDF5 file, which is closed at the end of the ``with`` block.

    Handlers of signals run in the main thread only. HDF5 works in a thread of its own, so that no handler raises in
    the middle of its calls. The thread makes all calls that it was given before it ends, also if an interrupt ends the
    wait for one: a file that is left open would crash HDF5 at the end of the program.
    """

    def __init__(self, path: Path):
        self._raw = _RawFile(path)
        self._file: h5py.File | None = None  # opened by the first call: the `with` block has begun then
        self._thread = ThreadPoolExecutor(1, "mpistrat-hdf5")
        # An interrupt while the thread begins leaves a thread that the pool does not know, and it begins another one.
        self._lock = threading.Lock()

    def do(self, write: Callable[[h5py.File], _Result]) -> _Result:
        """Return ``write(file)``, called by the thread of this file.

        Raise OSError if bytes cannot be written to the disk.
        """
        result = begin_call(self._thread, lambda: self._call(write)).result()
        self._raw.raise_error()
        return result

    def _call(self, write: Callable[[h5py.File], _Result]) -> _Result:
        with self._lock:
            if self._raw.closed:  # another file may have its descriptor by now
                raise ValueError("the file is closed")
            if self._file is None:
                self._file = h5py.File(self._raw, "w")
            return write(self._file)

    def _close(self) -> None:
        with self._lock:
            try:
                if self._file is not None:
                    self._file.close()
            finally:
                self._raw.close()

    def __enter__(self) -> Hdf5Output:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        closed = begin_call(self._thread, self._close)
        # Not by a join: if an interrupt ends it, Python before 3.13 takes the thread for ended. The end of the program
        # then stops the thread inside HDF5, and waits for ever for h5py's lock.
        closed.exception()
        self._thread.shutdown()
        if error is None:
            closed.result()
            self._raw.raise_error()


class SparseFile(io.RawIOBase):
    """A file in memory that h5py can write. Holes read as zeros and take no memory, but count in ``size``."""

    def __init__(self) -> None:
        self.size = self._position = 0
        self._writes: dict[tuple[int, int], bytes] = {}  # by offset and length, in the order of the last writes

    def written(self) -> list[tuple[int, bytes]]:
        """Return the offset and the bytes of each write, of which later ones lie over earlier ones."""
        return [(offset, data) for (offset, _), data in self._writes.items()]

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self.size)[whence]
        return self._position

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._put(view)
        self._position += len(view)
        self.size = max(self.size, self._position)
        return len(view)

    def _put(self, view: memoryview) -> None:
        self._writes.pop((self._position, len(view)), None)  # the new one comes last, over all earlier ones
        self._writes[self._position, len(view)] = bytes(view)

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer from the position."""
        first, view = self._position, memoryview(buffer).cast("B")[: max(0, self.size - self._position)]
        self._position = end = first + len(view)
        view[:] = self._below(first, len(view))
        for (start, count), data in self._writes.items():
            low, high = max(start, first), min(start + count, end)
            if low < high:
                view[low - first : high - first] = data[low - start : high - start]
        return len(view)

    def _below(self, start: int, count: int) -> bytes:
        """Return the bytes of a part of the file that lie below what is kept in memory."""
        return bytes(count)

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size


class _RawFile(SparseFile):
    """A file on the disk for h5py: it keeps what cannot be written in memory, and the error."""

    def __init__(self, path: Path):
        super().__init__()
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._error: OSError | None = None

    def raise_error(self) -> None:
        if self._error is not None:
            raise OSError(self._error.errno, os.strerror(self._error.errno or 0), str(self._path)) from self._error

    def _put(self, view: memoryview) -> None:
        if not self._try(lambda: write_all(self._descriptor, view, self._position)):
            super()._put(view)

    def _below(self, start: int, count: int) -> bytes:
        return os.pread(self._descriptor, count, start).ljust(count, b"\0")  # what was refused may lie beyond its end

    def truncate(self, size: int | None = None) -> int:
        size = super().truncate(size)
        self._try(lambda: os.ftruncate(self._descriptor, size))
        return size

    def _try(self, write: Callable[[], object]) -> bool:
        """Return whether the disk takes a write, as all before it."""
        try:
            # After an error all bytes stay in memory. What is on the disk is of no use then.
            if self._error is None:
                write()
        except OSError as error:
            self._error = error
        return self._error is None

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def place_at_once() -> Any:
    """Return the properties of a dataset that has a place in the file when it is made. No value is filled in."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return properties
