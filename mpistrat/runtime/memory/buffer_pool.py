"""Memory for arrays that is used again once nobody holds the array."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

_LEAST = 128 << 10  # bytes; smaller arrays cost nothing to allocate
_MOST = 256 << 20  # larger ones are rare, and not to be kept
_HUGE_PAGE = 2 << 20
_ASKED, _MADE = 4096, 256 << 20  # arrays, bytes: after so many, memory that was not needed is given back

# What has the bytes, and where in it they begin.
Memory: TypeAlias = "tuple[mmap.mmap | bytearray, int]"


class Buffers:
    """Makes arrays out of memory that earlier arrays have left.

    New memory costs a page fault for every 4 KiB, which is more than reading them. An array from here is
    the caller's for as long as it, or a view of it, is held; its memory is taken again after that. Any
    thread may ask, and any may let go.

    Memory that waits to be taken is given back when it was not needed for a while: of each size, what waited all
    the time while 4,096 arrays were asked for, or while 256 MiB of new memory were made.

    Parameters
    ----------
    allocate : callable, optional
        Makes memory: gets a number of bytes, returns an object with the buffer protocol, but no NumPy array, and
        where in it they begin. `new_memory` if not given.

    Examples
    --------
    >>> buffers = Buffers()
    >>> a = buffers.empty((1 << 18,), "f4")
    >>> where = a.ctypes.data
    >>> b = buffers.empty((1 << 18,), "f4")
    >>> del a
    >>> c = buffers.empty((512, 512), "f4")
    >>> b.ctypes.data != where, c.ctypes.data == where
    (True, True)
    """

    def __init__(self, allocate: Callable[[int], Memory] | None = None) -> None:
        self._allocate = allocate or new_memory
        self._free: dict[int, _Free] = {}  # few: there are eight sizes between a number and its double
        self._asked = self._made = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array with any values in it."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if not _LEAST <= nbytes <= _MOST or dtype.hasobject:
            return np.empty(shape, dtype)
        step = 1 << (nbytes.bit_length() - 4)  # batches of nearly equal size share
        capacity = -(-nbytes // step) * step
        free = self._free.get(capacity)
        if free is None:
            free = self._free.setdefault(capacity, _Free())
        try:
            memory = free.pop()
        except IndexError:
            memory = self._allocate(capacity)
            self._made += capacity
        if len(free) < free.least:
            free.least = len(free)
        self._asked += 1
        if self._asked >= _ASKED or self._made >= _MADE:
            self._give_back()
        lease = _Lease(shape, dtype, *memory)
        lease.memory, lease.home = memory, free
        array = lease.view(np.ndarray)
        if array.base is not lease:  # of arrays on arrays NumPy keeps the first only
            raise TypeError(
                f"memory for buffers must not be that of an array, as {type(memory[0]).__name__} is"
            )
        return array

    def _give_back(self) -> None:
        """What waited since the last time that this was called was not needed."""
        self._asked = self._made = 0
        for free in list(self._free.values()):
            with contextlib.suppress(IndexError):  # another thread takes as well
                for _ in range(free.least):
                    free.popleft()
            free.least = len(free)

    def __reduce__(self) -> tuple[type[Buffers], tuple[Any, ...]]:
        return Buffers, (self._allocate,)


class _Free(deque[Memory]):
    """Pieces of memory of one size that nobody holds, the longest unused first.

    Attributes
    ----------
    least : int
        How many there were at least, of late.
    """

    __slots__ = ("least",)

    def __init__(self) -> None:
        super().__init__()
        self.least = 0


def new_memory(size: int) -> Memory:
    """So many bytes and where they begin, in huge pages where the system has them: they are filled a tenth faster.

    They begin with a page. Memory of malloc begins 16 bytes after that, and copying a page of a file there takes
    half as long again: each load has to wait for the store before it, whose address ends with the same 12 bits.
    """
    if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 0
    pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages, -np.frombuffer(pages, np.uint8).ctypes.data % _HUGE_PAGE


class _Lease(np.ndarray):
    """What all arrays on one piece of memory refer to: it goes when the last of them goes."""

    __slots__ = ("home", "memory")

    memory: Memory
    home: deque[Memory]

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # of one that was interrupted when it was made
            self.home.append(self.memory)
