"""Writing bytes to the disk while the program produces more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from mpistrat.process.atomic_file import write_all

_AT_ONCE = 16 << 20
_SMALL = 64 << 10
_FLUSHED = 64 << 20  # bytes between flushes, so that the disk begins before all is written
_flush = getattr(os, "fdatasync", os.fsync)


class DiskWriter:
    """A writer with one thread that writes bytes in order, and one that flushes them to the disk.

    Create it by `disk_writer`.
    """

    def __init__(self, descriptor: int, writing: ThreadPoolExecutor, flushing: ThreadPoolExecutor):
        self._descriptor = descriptor
        self._writing = writing
        self._flushing = flushing
        self._written: list[Future[None]] = []
        self._flushed: list[Future[None]] = []
        self._waiting = 0  # bytes written since the last flush

    def put(self, data: memoryview, offset: int) -> None:
        """Write data at this offset soon. Do not change the memory before `settle` returns."""
        if len(data) < _SMALL:  # a write takes less time than handing it to the thread
            write_all(self._descriptor, data, offset)
            return
        try:
            self._written.append(self._writing.submit(self._put, data, offset))
        except RuntimeError:  # at interpreter exit executors accept no more work
            self._put(data, offset)

    def sync(self) -> None:
        """Begin to flush all bytes that were put, which takes the disk but no core. `settle` waits for it."""
        try:
            self._written.append(self._writing.submit(_flush, self._descriptor))
        except RuntimeError:  # at interpreter exit
            for each in self._written:
                each.result()
            _flush(self._descriptor)

    def settle(self) -> None:
        """Wait until all bytes are in the file and all begun flushes are done. Raise the first OSError of these."""
        for each in self._written:
            each.result()
        for each in self._flushed:
            each.result()

    def _put(self, data: memoryview, offset: int) -> None:
        for start in range(0, len(data), _AT_ONCE):
            part = data[start : start + _AT_ONCE]
            write_all(self._descriptor, part, offset + start)
            self._waiting += len(part)
            if self._waiting >= _FLUSHED:
                self._begin_to_flush()

    def _begin_to_flush(self) -> None:
        self._waiting = 0
        with contextlib.suppress(RuntimeError):  # at interpreter exit: the final fsync then takes longer
            self._flushed.append(self._flushing.submit(_flush, self._descriptor))


@contextlib.contextmanager
def disk_writer(descriptor: int) -> Iterator[DiskWriter]:
    """Provide a `DiskWriter` for an open file.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     with disk_writer(file.fileno()) as writer:
    ...         writer.put(memoryview(b"abc"), 2)
    ...         writer.settle()
    ...     file.read()
    b'\\x00\\x00abc'
    """
    with ThreadPoolExecutor(1, "mpistrat-write") as writing, ThreadPoolExecutor(1, "mpistrat-flush") as flushing:
        try:
            yield DiskWriter(descriptor, writing, flushing)
        except BaseException:
            writing.shutdown(cancel_futures=True)
            flushing.shutdown(cancel_futures=True)
            raise
