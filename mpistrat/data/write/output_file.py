"""A new file for h5py to write to, such that HDF5 never meets an error of the system.

HDF5 keeps chunks and its index in memory. If these cannot be written later, as the disk is full, it crashes, or
keeps the file open until the program ends. Here such bytes stay in memory, HDF5 closes the file in peace, and the
error is raised afterwards.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import h5py

from mpistrat.process.atomic_file import write_all

_Result = TypeVar("_Result")


class Hdf5Output:
    """A new HDF5 file, which is closed at the end of the ``with`` block.

    Handlers of signals run in the main thread only. HDF5 works in a thread of its own, so that no handler raises in
    the middle of its calls. The thread makes all calls that it was given before it ends, also if an interrupt ends the
    wait for one: a file that is left open would crash HDF5 at the end of the program.
    """

    def __init__(self, path: Path):
        self._raw = _RawFile(path)
        self._thread = ThreadPoolExecutor(1, "mpistrat-hdf5")
        self._opened = self._begin(lambda: h5py.File(self._raw, "w"))

    def _begin(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Begin a call by the thread of this file; at the end of the program, which takes no work, make it here."""
        try:
            return self._thread.submit(call)
        except RuntimeError:
            made: Future[_Result] = Future()
            try:
                made.set_result(call())
            except Exception as error:
                made.set_exception(error)
            return made

    def do(self, write: Callable[[h5py.File], _Result]) -> _Result:
        """Return ``write(file)``, called by the thread of this file.

        Raise OSError if bytes cannot be written to the disk.
        """
        result = self._begin(lambda: write(self._opened.result())).result()
        self._raw.raise_error()
        return result

    def _close(self) -> None:
        try:
            self._opened.result().close()
        finally:
            self._raw.close()

    def __enter__(self) -> Hdf5Output:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        closed = self._begin(self._close)
        self._thread.shutdown()
        if error is None:
            closed.result()
            self._raw.raise_error()


class _RawFile(io.RawIOBase):
    """What h5py takes for a file: it keeps what cannot be written, and the error."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._place = 0
        self._size = 0
        self._error: OSError | None = None
        self._kept: list[tuple[int, bytes]] = []  # what was written since the error, and where

    def raise_error(self) -> None:
        if self._error is not None:
            raise OSError(self._error.errno, os.strerror(self._error.errno or 0), str(self._path)) from self._error

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                write_all(self._descriptor, view, self._place)
            except OSError as error:
                self._error = error
        if self._error is not None:
            self._kept.append((self._place, bytes(view)))
        self._place += len(view)
        self._size = max(self._size, self._place)
        return len(view)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._place)]
        view[:] = os.pread(self._descriptor, len(view), self._place).ljust(len(view), b"\0")
        for start, data in self._kept:
            low, high = max(start, self._place), min(start + len(data), self._place + len(view))
            if low < high:
                view[low - self._place : high - self._place] = data[low - start : high - start]
        self._place += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        self._size = self._place if size is None else size
        if self._error is None:
            try:
                os.ftruncate(self._descriptor, self._size)
            except OSError as error:
                self._error = error
        return self._size

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()
