"""Bytes on their way to the disk, while the program makes more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

_AT_ONCE = 16 << 20
_SMALL = 64 << 10
_FLUSHED = 64 << 20  # the disk begins with so many, instead of when all are written
_flush = getattr(os, "fdatasync", os.fsync)


class DiskWriter:
    """Writes in one thread what it is given, in order, and brings it to the disk in another.

    Get it by `disk_writer`.
    """

    def __init__(self, descriptor: int, writing: ThreadPoolExecutor, flushing: ThreadPoolExecutor):
        self._descriptor = descriptor
        self._writing = writing
        self._flushing = flushing
        self._written: list[Future[None]] = []
        self._flushed: list[Future[None]] = []
        self._waiting = 0  # bytes

    def put(self, data: memoryview, offset: int) -> None:
        """Write this there, at some time soon: the memory must not change until `settle` has returned."""
        if len(data) < _SMALL:  # handing over takes longer
            _put(self._descriptor, data, offset)
            return
        try:
            self._written.append(self._writing.submit(self._put, data, offset))
        except RuntimeError:  # the program is at its end, and its executors take no more
            self._put(data, offset)

    def settle(self) -> None:
        """Wait until all is in the file, and nearly all on the disk.

        Raises
        ------
        OSError
            What was wrong first.
        """
        for each in self._written:
            each.result()
        for each in self._flushed:
            each.result()

    def _put(self, data: memoryview, offset: int) -> None:
        for start in range(0, len(data), _AT_ONCE):
            part = data[start : start + _AT_ONCE]
            _put(self._descriptor, part, offset + start)
            self._waiting += len(part)
            if self._waiting >= _FLUSHED:
                self._begin_to_flush()

    def _begin_to_flush(self) -> None:
        self._waiting = 0
        with contextlib.suppress(RuntimeError):  # as above: who syncs the file then waits longer
            self._flushed.append(self._flushing.submit(_flush, self._descriptor))


def _put(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


@contextlib.contextmanager
def disk_writer(descriptor: int) -> Iterator[DiskWriter]:
    """A `DiskWriter` for a file that is open.

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
    with (
        ThreadPoolExecutor(1, "mpistrat-write") as writing,
        ThreadPoolExecutor(1, "mpistrat-flush") as flushing,
    ):
        try:
            yield DiskWriter(descriptor, writing, flushing)
        except BaseException:
            writing.shutdown(cancel_futures=True)
            flushing.shutdown(cancel_futures=True)
            raise
