"""The buffer pool: memory for arrays, reused after the array is deleted."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import deque
from typing import Any, TypeAlias

import numpy as np

_LEAST = 128 << 10  # bytes; the allocation of smaller arrays is cheap
_MOST = 256 << 20  # bytes; larger arrays are rare and too large to keep
_HUGE_PAGE = 2 << 20
_REQUESTS, _NEW_BYTES = 4096, 256 << 20  # arrays, bytes: after so many, unused memory is freed

Memory: TypeAlias = "tuple[mmap.mmap, int]"  # pages, and the offset of the first usable byte


class Buffers:
    """A buffer pool: it makes arrays from the memory of deleted arrays, in any thread.

    New memory costs a page fault for every 4 KiB, which takes longer than reading the page. The caller owns an array
    for as long as it or a view exists. Of each size, the pool frees what stayed unused while 4,096 arrays were
    requested, or 256 MiB of new memory were allocated.

    >>> buffers = Buffers()
    >>> a = buffers.empty((1 << 18,), "f4")
    >>> address = a.ctypes.data
    >>> del a
    >>> buffers.empty((512, 512), "f4").ctypes.data == address
    True
    """

    def __init__(self) -> None:
        self._free: dict[int, _FreeBlocks] = {}  # few keys: eight sizes per power of two
        self._requested = self._new_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if not _LEAST <= nbytes <= _MOST or dtype.hasobject:
            return np.empty(shape, dtype)
        step = 1 << (nbytes.bit_length() - 4)  # batches of nearly equal size share memory
        capacity = -(-nbytes // step) * step
        free = self._free.get(capacity)
        if free is None:
            free = self._free.setdefault(capacity, _FreeBlocks())
        try:
            memory = free.pop()
        except IndexError:
            memory = new_memory(capacity)
            self._new_bytes += capacity
        if len(free) < free.least:
            free.least = len(free)
        self._requested += 1
        if self._requested >= _REQUESTS or self._new_bytes >= _NEW_BYTES:
            self._give_back()
        lease = _Lease(shape, dtype, *memory)
        lease.memory, lease.free_blocks = memory, free
        return lease.view(np.ndarray)

    def _give_back(self) -> None:
        """Free the memory that stayed unused since the last call."""
        self._requested = self._new_bytes = 0
        for free in list(self._free.values()):
            with contextlib.suppress(IndexError):  # another thread may take memory at the same time
                for _ in range(free.least):
                    free.popleft()
            free.least = len(free)

    def __reduce__(self) -> tuple[type[Buffers], tuple[()]]:
        return Buffers, ()


class _FreeBlocks(deque[Memory]):
    """Unused blocks of memory of one size, the longest unused first; ``least`` since the pool last freed memory."""

    __slots__ = ("least",)

    def __init__(self) -> None:
        super().__init__()
        self.least = 0


def new_memory(size: int) -> Memory:
    """Return new memory of ``size`` bytes, and the offset of its first byte, which begins a page, best a huge one.

    Filling huge pages is a tenth faster. malloc's memory begins 16 bytes after a boundary: copying a page of a file
    there takes 1.5 times as long, since each load waits for the store before it, whose address ends in these 12 bits.
    """
    if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 0
    pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages, -np.frombuffer(pages, np.uint8).ctypes.data % _HUGE_PAGE


class _Lease(np.ndarray):
    """The owner that all arrays on one block of memory refer to. It is deleted with the last of them."""

    __slots__ = ("free_blocks", "memory")

    memory: Memory
    free_blocks: deque[Memory]

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # an interrupted constructor left it without them
            self.free_blocks.append(self.memory)
