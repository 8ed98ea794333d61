"""Memory for arrays that is used again once nobody holds the array."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import deque
from typing import Any

import numpy as np

_LEAST = 128 << 10  # bytes; smaller arrays cost nothing to allocate
_MOST = 256 << 20  # larger ones are rare, and not to be kept
_HUGE_PAGE = 2 << 20


class Buffers:
    """Makes arrays out of memory that earlier arrays have left.

    New memory costs a page fault for every 4 KiB, which is more than reading them. An array from here is
    the caller's for as long as it, or a view of it, is held; its memory is taken again after that. Any
    thread may ask, and any may let go.

    Parameters
    ----------
    kept_of_a_size, sizes : int
        How many pieces of memory wait to be taken again: of one size, and of how many sizes.

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

    def __init__(self, kept_of_a_size: int = 4, sizes: int = 8):
        self._kept_of_a_size = kept_of_a_size
        self._sizes = sizes
        self._free: dict[int, deque[np.ndarray]] = {}

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
            if len(self._free) >= self._sizes:
                self._free = {}
            free = self._free[capacity] = deque(maxlen=self._kept_of_a_size)
        try:
            memory = free.pop()
        except IndexError:
            memory = _new_memory(capacity)
        array = np.asarray(_Lease(memory, free))
        return array[:nbytes].view(dtype).reshape(shape)

    def __reduce__(self) -> tuple[type[Buffers], tuple[int, int]]:
        return Buffers, (self._kept_of_a_size, self._sizes)


def _new_memory(size: int) -> np.ndarray:
    """Bytes, in huge pages where the system has them: they are filled a tenth faster."""
    if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(size, np.uint8)
    pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.__array_interface__["data"][0] % _HUGE_PAGE
    return memory[start : start + size]


class _Lease:
    """What all arrays on one piece of memory refer to: it goes when the last of them goes."""

    __slots__ = ("__array_interface__", "_home", "_memory")

    def __init__(self, memory: np.ndarray, home: deque[np.ndarray]):
        self.__array_interface__ = memory.__array_interface__
        self._memory = memory
        self._home = home

    def __del__(self) -> None:
        self._home.append(self._memory)
