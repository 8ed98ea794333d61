"""Arrays that one process writes and other processes of its node read, guarded by a sequence lock.

The process that writes counts: the number is odd while it writes, and even otherwise. A reader copies, and compares
the number before and after. If it was odd or has changed, the copy is dropped. So a reader never holds up the writer,
and a writer that dies leaves a reader without a copy, not waiting.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from mpistrat.runtime.memory.shared import pages
from mpistrat.runtime.process import private_file

_TOKEN = 64  # where the token begins, in the cache line after that of the number
_TOKEN_BYTES = 16
# The number must change before and after the arrays in the eyes of other cores. Other processors than these need an
# instruction for that, which Python does not have.
_IN_ORDER = ("x86_64", "AMD64")
_T = TypeVar("_T")


class Place(NamedTuple):
    """Where other processes of the node find an array.

    Attributes
    ----------
    path : str
        The file.
    token : bytes
        What the file must hold. On another process the path may lead to another file.
    start : int
        The first byte of the array.
    shape : tuple of int
    dtype : str
    """

    path: str
    token: bytes
    start: int
    shape: tuple[int, ...]
    dtype: str


class Memory(Protocol):
    """Memory for arrays that are written between `begin` and `end`."""

    def copy(self, value: np.ndarray) -> tuple[np.ndarray, Place | None]: ...

    def begin(self) -> None: ...

    def end(self) -> None: ...


class PrivateMemory:
    """Memory that no other process reads."""

    def copy(self, value: np.ndarray) -> tuple[np.ndarray, None]:
        """Return a copy of an array."""
        return np.array(value), None

    def begin(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


class PublishedMemory:
    """Memory of this process that others of the node read.

    It is a sparse file without a name. Each array has new pages at its end. The system gets the pages of an array
    back when the array is deleted.

    Raises
    ------
    OSError
        If this system cannot share memory in this way.

    Examples
    --------
    >>> memory = PublishedMemory()
    >>> array, place = memory.copy(np.arange(3))
    >>> reader = Reader(place)
    >>> view = reader.view(place)
    >>> memory.begin()
    >>> array += 1
    >>> print(reader.attempt(each.copy() for each in [view]))
    None
    >>> memory.end()
    >>> reader.attempt(each.copy() for each in [view])
    [array([1, 2, 3])]
    """

    def __init__(self) -> None:
        if os.uname().machine not in _IN_ORDER:
            raise OSError(f"processors {os.uname().machine} may write in another order")
        self._file, self._path = private_file.create_in_memory()
        weakref.finalize(self, os.close, self._file).atexit = False
        os.posix_fallocate(self._file, 0, mmap.PAGESIZE)
        self._token = os.urandom(_TOKEN_BYTES)
        os.pwrite(self._file, self._token, _TOKEN)
        self._number = memoryview(mmap.mmap(self._file, mmap.PAGESIZE)).cast("q")
        self._end = mmap.PAGESIZE

    def copy(self, value: np.ndarray) -> tuple[np.ndarray, Place | None]:
        """Return a copy of an array, and its place; None if memory for this process alone had to do.

        Raises
        ------
        MemoryError
            If there is not enough memory.
        """
        np.empty(
            value.nbytes, np.uint8
        )  # raises MemoryError; the system kills a process whose file is too large
        start, nbytes = self._end, pages(max(1, value.nbytes))
        try:
            os.posix_fallocate(self._file, start, nbytes)
            mapped = mmap.mmap(self._file, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=start)
        except OSError:  # a process has some ten thousand mappings
            return np.array(value), None
        self._end += nbytes
        memory = np.frombuffer(mapped, np.uint8)
        weakref.finalize(memory, _give_back, mapped, os.getpid()).atexit = False
        array = _array(memory, value.shape, value.dtype)
        array[...] = value
        return array, Place(self._path, self._token, start, value.shape, value.dtype.str)

    def begin(self) -> None:
        """Begin to write, if that has not begun."""
        self._number[0] |= 1

    def end(self) -> None:
        """End to write, if that has begun."""
        number = self._number[0]
        self._number[0] = number + (number & 1)


class Reader:
    """The arrays that another process of this node publishes.

    Parameters
    ----------
    place : Place
        Of any array.

    Raises
    ------
    OSError
        If this process cannot read that memory.
    """

    def __init__(self, place: Place):
        self._file = private_file.open_other(place.path, place.token, _TOKEN)
        weakref.finalize(self, os.close, self._file).atexit = False
        self._number = memoryview(self._mapped(0, mmap.PAGESIZE)).cast("q")

    def view(self, place: Place) -> np.ndarray:
        """Return the memory of an array, to be copied in `attempt`.

        Raises
        ------
        OSError
            If this process has too many mappings.
        """
        dtype = np.dtype(place.dtype)
        nbytes = pages(max(1, int(np.prod(place.shape)) * dtype.itemsize))
        return _array(np.frombuffer(self._mapped(place.start, nbytes), np.uint8), place.shape, dtype)

    def _mapped(self, start: int, nbytes: int) -> mmap.mmap:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(self._file, nbytes, flags, mmap.PROT_READ, offset=start)

    def attempt(self, copies: Iterable[_T]) -> list[_T] | None:
        """Return copies, which are made one after the other, or None if the other process wrote meanwhile."""
        before = self._number[0]
        if before & 1:
            return None
        made = []
        for copy in copies:
            made.append(copy)
            if self._number[0] != before:
                return None
        return made


def _give_back(mapped: mmap.mmap, process: int) -> None:
    """Give the pages of an array back to the system, unless this is a forked child, whose parent may use them."""
    if os.getpid() == process:
        with suppress(OSError):
            mapped.madvise(mmap.MADV_REMOVE)


def _array(memory: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return memory[:nbytes].view(dtype).reshape(shape)
