"""A new file for h5py to write to, such that HDF5 never meets an error of the system.

HDF5 keeps chunks and its index in memory. If these cannot be written later, as the disk is full, it crashes, or
keeps the file open until the program ends. Here such bytes stay in memory, HDF5 closes the file in peace, and the
error is raised afterwards.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import h5py

from mpistrat.process.atomic_file import write_all

_LOOK_AROUND = 0.2  # seconds between two looks whether the caller is still there
_Result = TypeVar("_Result")
_Job = Callable[[h5py.File], Any]


class Hdf5Output:
    """An HDF5 file that is being written. Get it by `hdf5_output`.

    Handlers of signals run in the main thread only. HDF5 works in a thread of its own, so that no handler raises in
    the middle of its calls. That thread closes the file when it is told to, and when this object or the program ends:
    a file that an interrupt left open would crash HDF5 at the end of the program.
    """

    def __init__(self, path: Path):
        self._raw = _RawFile(path)
        # Queues in C: an interrupt leaves no lock of theirs taken.
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._answers: SimpleQueue[_Answer] = SimpleQueue()
        arguments = self._raw, self._jobs, self._answers, weakref.ref(self)
        self._thread = threading.Thread(target=_serve, args=arguments, name="mpistrat-hdf5")
        self._thread.start()

    def do(self, write: Callable[[h5py.File], _Result]) -> _Result:
        """Return ``write(file)``, called by the thread of this file.

        Raise OSError if bytes cannot be written to the disk.
        """
        self._jobs.put(write)
        answer = self._answers.get()
        if answer.error is not None:
            raise answer.error
        self._raw.raise_error()
        result: _Result = answer.result
        return result

    def close(self) -> BaseException | None:
        """Let the thread close the file, wait for it, and return the error that it met."""
        self._jobs.put(None)
        answer = self._answers.get()
        while not answer.last:  # of a call that was interrupted
            answer = self._answers.get()
        self._thread.join()
        return answer.error

    def raise_error(self) -> None:
        """Raise OSError if bytes could not be written to the disk."""
        self._raw.raise_error()


@contextlib.contextmanager
def hdf5_output(path: Path) -> Iterator[Hdf5Output]:
    """Make an HDF5 file, which is closed at the end of the block.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with hdf5_output(Path(folder.name) / "a.h5") as output:
    ...     output.do(lambda file: file.create_dataset("x", data=[1, 2])).shape
    (2,)
    >>> with h5py.File(Path(folder.name) / "a.h5") as file:
    ...     file["x"][()]
    array([1, 2])
    >>> folder.cleanup()
    """
    output = Hdf5Output(path)
    failed: BaseException | None = None
    try:
        yield output
    finally:
        failed = output.close()
    if failed is not None:
        raise failed
    output.raise_error()


class _Answer(NamedTuple):
    """What a call gave, or the error that it raised; the last one is that of closing the file."""

    result: Any = None
    error: BaseException | None = None
    last: bool = False


def _serve(
    raw: _RawFile,
    jobs: SimpleQueue[_Job | None],
    answers: SimpleQueue[_Answer],
    owner: weakref.ref[Hdf5Output],
) -> None:
    """Make the calls of a file, and close it."""
    failed: BaseException | None = None
    try:
        with h5py.File(raw, "w") as file:
            while (job := _next(jobs, owner)) is not None:
                try:
                    answers.put(_Answer(job(file)))
                except BaseException as error:
                    answers.put(_Answer(error=error))
                del job
    except BaseException as error:
        failed = error
    finally:
        raw.close()
        answers.put(_Answer(error=failed, last=True))


def _next(jobs: SimpleQueue[_Job | None], owner: weakref.ref[Hdf5Output]) -> _Job | None:
    """Return the next call, or None if there will be none: an interrupt may have ended the caller without a word."""
    while True:
        try:
            return jobs.get(timeout=_LOOK_AROUND)
        except Empty:
            if owner() is None or not threading.main_thread().is_alive():
                return None


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
