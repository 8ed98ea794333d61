"""Arrays that one process writes and other processes of its node read, guarded by a sequence lock.

The process that writes counts: the number is odd while it writes, and even otherwise. A reader copies, and compares
the number before and after. If it was odd or has changed, the copy is dropped. So a reader never holds up the writer,
and a writer that dies leaves a reader without a copy, not waiting.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpistrat.memory.node import pages
from mpistrat.process import private_file

_TOKEN = 64  # where the token begins, in the cache line after the number's
_TOKEN_BYTES = 16
# The number must change before and after the arrays in the eyes of other cores. Other processors than these need an
# instruction for that, which Python does not have.
_IN_ORDER = "x86_64"
_SPACE = 1 << 40  # bytes of addresses, which take no memory. One mapping, since each one takes a descriptor
_BEFORE = 64  # bytes before an array, so that it begins with a cache line: the first of them is 1 while it is there
_T = TypeVar("_T")


class Location(NamedTuple):
    """Where other processes of the node find an array."""

    path: str  # the file
    token: bytes  # what the file must hold. On another process the path may lead to another file.
    start: int  # the first byte of its memory
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class View(NamedTuple):
    """An array of another process, to be copied in `Reader.attempt`."""

    array: np.ndarray
    mark: np.ndarray

    @property
    def lives(self) -> bool:
        """Whether the array is still there. If so after a copy was made, the copy is right."""
        return bool(self.mark[0])


class Memory:
    """Memory for arrays that are written between `begin` and `end`. No other process reads it."""

    def copy(self, value: np.ndarray) -> tuple[np.ndarray, Location | None]:
        """Return a copy of an array, and its place; None if other processes cannot read it."""
        return np.array(value), None

    def begin(self) -> None:
        """Begin to write, if that has not begun."""

    def end(self) -> None:
        """End to write, if that has begun."""


class PublishedMemory(Memory):
    """Memory of this process that others of the node read: a sparse file without a name.

    Each array gets new pages, which the system gets back at its end. Their place is not used again: a reader cannot
    take another array for it. Raise OSError if this system cannot share memory in this way.

    >>> memory = PublishedMemory()
    >>> array, place = memory.copy(np.arange(3))
    >>> reader = Reader(place)
    >>> view = reader.view(place)
    >>> memory.begin()
    >>> array += 1
    >>> print(reader.attempt(each.copy() for each in [view.array]))
    None
    >>> memory.end()
    >>> reader.attempt(each.copy() for each in [view.array])
    [array([1, 2, 3])]
    """

    def __init__(self) -> None:
        if os.uname().machine != _IN_ORDER:
            raise OSError(f"processors {os.uname().machine} may write in another order")
        self._file, self._path = private_file.create_in_memory()
        weakref.finalize(self, os.close, self._file).atexit = False
        os.posix_fallocate(self._file, 0, mmap.PAGESIZE)
        os.ftruncate(self._file, _SPACE)
        self._mapped = mmap.mmap(self._file, _SPACE)
        self._token = os.urandom(_TOKEN_BYTES)
        self._mapped[_TOKEN : _TOKEN + _TOKEN_BYTES] = self._token
        self._number = np.frombuffer(self._mapped, np.int64, 1)
        self._end = mmap.PAGESIZE

    def copy(self, value: np.ndarray) -> tuple[np.ndarray, Location | None]:
        # Raises MemoryError: the system would kill a process whose file is too large.
        np.empty(value.nbytes, np.uint8)
        start, nbytes = self._end, pages(_BEFORE + value.nbytes)
        try:
            if start + nbytes > _SPACE:
                return super().copy(value)
            os.posix_fallocate(self._file, start, nbytes)
        except OSError:
            return super().copy(value)
        self._end += nbytes
        memory = np.frombuffer(self._mapped, np.uint8, nbytes, start)
        weakref.finalize(memory, _give_back, self._mapped, start, nbytes, os.getpid()).atexit = False
        array = _array(memory, value.shape, value.dtype)
        array[...] = value
        memory[0] = 1
        return array, Location(self._path, self._token, start, value.shape, value.dtype)

    def begin(self) -> None:
        self._number[0] |= 1

    def end(self) -> None:
        number = self._number[0]
        self._number[0] = number + (number & 1)


class Reader:
    """The arrays that another process publishes, of which ``location`` is any. Raise OSError if they cannot be read."""

    def __init__(self, location: Location):
        file = private_file.open_other(location.path, location.token, _TOKEN)
        try:
            self._mapped = mmap.mmap(file, _SPACE, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self._number = np.frombuffer(self._mapped, np.int64, 1)

    def view(self, location: Location) -> View:
        nbytes = _BEFORE + math.prod(location.shape) * location.dtype.itemsize
        memory = np.frombuffer(self._mapped, np.uint8, nbytes, location.start)
        return View(_array(memory, location.shape, location.dtype), memory[:1])

    def attempt(self, copies: Iterable[_T]) -> list[_T] | None:
        """Return copies, which are made one after the other, or None if the other process wrote meanwhile."""
        before = self._number[0]
        if before & 1:
            return None
        results = []
        for copy in copies:
            results.append(copy)
            if self._number[0] != before:
                return None
        return results


def _give_back(mapped: mmap.mmap, start: int, nbytes: int, process: int) -> None:
    """Give the pages of an array back to the system, unless this is a forked child, whose parent may use them."""
    if os.getpid() == process:
        mapped[start] = 0  # before the pages become zeros
        with suppress(OSError):
            mapped.madvise(mmap.MADV_REMOVE, start, nbytes)


def _array(memory: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[_BEFORE : _BEFORE + nbytes].view(dtype).reshape(shape)
