"""A new file for h5py to write to, such that HDF5 never meets an error of the system.

HDF5 keeps chunks and its index in memory. If these cannot be written later, as the disk is full, it crashes, or
keeps the file open until the program ends. Here such bytes stay in memory, HDF5 closes the file in peace, and the
error is raised afterwards.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import h5py

_PAGE = 4096
_Result = TypeVar("_Result")


class Hdf5Output:
    """An HDF5 file that is being written. Get it by `hdf5_output`."""

    def __init__(self, raw: _RawFile, thread: ThreadPoolExecutor, opened: Future[h5py.File]):
        self._raw = raw
        self._thread = thread
        self._opened = opened

    def do(self, write: Callable[[h5py.File], _Result]) -> _Result:
        """Return ``write(file)``, called by the thread of this file.

        Raises
        ------
        OSError
            If bytes cannot be written to the disk.
        """
        result = self._thread.submit(write, self._opened.result()).result()
        self._raw.raise_error()
        return result


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
    raw = _RawFile(path)
    # Handlers of signals run in the main thread only: none raises while HDF5 is in the middle of a call.
    with ThreadPoolExecutor(1, "mpistrat-hdf5") as thread:
        opened = thread.submit(h5py.File, raw, "w")
        try:
            yield Hdf5Output(raw, thread, opened)
        finally:
            closed = thread.submit(_close, opened, raw)  # the end of the executor waits for it
    closed.result()
    raw.raise_error()


def _close(opened: Future[h5py.File], raw: _RawFile) -> None:
    try:
        opened.result().close()
    finally:
        raw.close()


class _RawFile(io.RawIOBase):
    """What h5py takes for a file: it keeps what cannot be written, and the error."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._place = 0
        self._size = 0
        self._error: OSError | None = None
        self._kept: dict[int, bytearray] = {}  # pages written since the error

    def raise_error(self) -> None:
        if self._error is not None:
            raise OSError(
                self._error.errno, os.strerror(self._error.errno or 0), str(self._path)
            ) from self._error

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                _write(self._descriptor, view, self._place)
            except OSError as error:
                self._error = error
        if self._error is not None:
            for page, inside, part in _pages(self._place, view):
                self._page(page)[inside : inside + len(part)] = part
        self._place += len(view)
        self._size = max(self._size, self._place)
        return len(view)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._place)]
        for page, inside, part in _pages(self._place, view) if self._kept else ():
            if page in self._kept:
                part[:] = self._kept[page][inside : inside + len(part)]
            else:
                part[:] = self._stored(page * _PAGE + inside, len(part))
        if not self._kept:
            view[:] = self._stored(self._place, len(view))
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

    def _page(self, page: int) -> bytearray:
        if page not in self._kept:
            self._kept[page] = bytearray(self._stored(page * _PAGE, _PAGE))
        return self._kept[page]

    def _stored(self, offset: int, count: int) -> bytes:
        return os.pread(self._descriptor, count, offset).ljust(count, b"\0")


def _write(descriptor: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _pages(offset: int, view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yield each page's part of bytes from ``offset`` on: the page, where the part begins there, and the part."""
    start = 0
    while start < len(view):
        page, inside = divmod(offset + start, _PAGE)
        part = view[start : start + _PAGE - inside]
        yield page, inside, part
        start += len(part)
