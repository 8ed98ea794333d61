"""Copies of arrays from the host to a GPU while it computes, on a separate stream.

Memory of a released array is reused after the work that uses it is done. CUDA events order this between streams. The
calling thread waits only before it overwrites pinned memory that has not been copied yet.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays.device import cupy_for, lent, on_device
from mpistrat.arrays.gpu import pinned

_CHUNKS = 4  # in the ring of pinned memory: a thread fills one chunk while the others are copied
_ALIGNMENT = 256  # bytes, of an array in a chunk
_KEPT = 2  # times the arrays of a call: so many released arrays may wait for the GPU before a copy waits for one

_idle: dict[int, list[Feed]] = {}
_lost: list[Any] = []  # arrays whose end of use is unknown, which are never freed


class Sent(NamedTuple):
    """Arrays in a feed's memory, whose copies may be running, and the event after the last. For `received` only."""

    arrays: list[Any]
    ready: Any
    feed: Feed


class Feed:
    """The stream and the pinned memory by which one thread at a time sends arrays to a GPU.

    ``left`` has the released arrays, oldest first, each with the event that marks its release in the thread's stream.
    """

    def __init__(self, device: int):
        self.device = device
        self._cupy = cupy = cupy_for("an array on a GPU")
        with on_device(device):
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self._ring = [(pinned.chunk(cupy), cupy.cuda.Event(disable_timing=True)) for _ in range(_CHUNKS)]
        self._at = self._used = 0
        self.left: deque[tuple[Any, Any]] = deque()

    def send(self, arrays: Sequence[np.ndarray]) -> Sent:
        """Begin to copy arrays to the GPU. The caller may write to the arrays when this returns."""
        cupy = self._cupy
        for each in arrays:
            pinned.require_known(cupy, each.dtype)
        with on_device(self.device), self.stream:
            self.reclaim(_KEPT * len(arrays))
            out = []
            for each in arrays:
                out.append(cupy.empty(each.shape, each.dtype))
                if each.nbytes:
                    self._copy(np.ascontiguousarray(each).reshape(-1).view(np.uint8), int(out[-1].data.ptr))
            self._ring[self._at][1].record(self.stream)
            ready = cupy.cuda.Event(disable_timing=True)
            ready.record(self.stream)
        return Sent(out, ready, self)

    def _copy(self, data: np.ndarray, target: int) -> None:
        runtime, start = self._cupy.cuda.runtime, 0
        while start < len(data):
            room = pinned.CHUNK_BYTES - self._used
            if not room:
                room = self._next_chunk()
            part = data[start : start + room]
            memory = self._ring[self._at][0][self._used : self._used + len(part)]
            memory[...] = part
            runtime.memcpyAsync(
                target + start, pinned.address(memory), len(part), runtime.memcpyHostToDevice, self.stream.ptr
            )
            start += len(part)
            self._used += -(-len(part) // _ALIGNMENT) * _ALIGNMENT

    def _next_chunk(self) -> int:
        """Wait until the next chunk of the ring has been copied, switch to it, and return its size in bytes."""
        self._ring[self._at][1].record(self.stream)
        self._at, self._used = (self._at + 1) % _CHUNKS, 0
        self._ring[self._at][1].synchronize()
        return pinned.CHUNK_BYTES

    def reclaim(self, most: float = math.inf) -> None:
        """Free released arrays that the GPU no longer uses. Above ``most``, the stream waits for the oldest."""
        while self.left:
            try:
                event, memory = self.left.popleft()
            except IndexError:  # another thread took the last one
                return
            if event.done:
                continue
            if len(self.left) < most:
                self.left.appendleft((event, memory))
                return
            self.stream.wait_event(event)


def feed(device: int) -> AbstractContextManager[Feed]:
    """Return a context that gives a feed of a GPU."""
    return lent(_idle, device, Feed)


def received(sent: Sent) -> list[Any]:
    """Return the arrays for the caller's current stream, which waits for the copies. See CuPy for other streams."""
    cupy = cupy_for("an array on a GPU")
    with on_device(sent.feed.device):
        stream = cupy.cuda.get_current_stream()
        stream.wait_event(sent.ready)
        return [_lent(cupy, each, stream, sent.feed) for each in sent.arrays]


def _lent(cupy: Any, array: Any, stream: Any, feed: Feed) -> Any:
    if not array.nbytes:
        return array
    lease = _BatchLease(array, cupy.cuda.Event(disable_timing=True), stream, feed)
    memory = cupy.cuda.UnownedMemory(int(array.data.ptr), array.nbytes, lease, feed.device)
    return cupy.ndarray(array.shape, array.dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))


class _BatchLease:
    """The owner that all arrays on one block of memory refer to. It is deleted with the last of them."""

    __slots__ = ("_array", "_event", "_feed", "_stream")

    def __init__(self, array: Any, event: Any, stream: Any, feed: Feed):
        self._array, self._event, self._stream, self._feed = array, event, stream, feed

    def __del__(self) -> None:
        if sys.is_finalizing():  # CUDA may have ended
            return
        try:
            # Perhaps in another thread, with another GPU: CUDA's stream 0 is that of the current GPU.
            with on_device(self._feed.device):
                self._event.record(self._stream)
        except Exception:
            _lost.append(self._array)  # kernels may still read it
            raise
        self._feed.left.append((self._event, self._array))
        del self._array
        self._feed.reclaim()
