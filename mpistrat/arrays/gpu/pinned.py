"""Copies between a GPU and the host, through a few pinned staging buffers that are never freed.

From unpinned memory, the driver copies through its own buffers, piece by piece, while the caller waits. Pinned memory
is never returned to the system, and MPI libraries keep its registration. So there are few buffers, all of one size.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays.device import cupy_for, lent, on_device
from mpistrat.memory.buffer_pool import Buffers

CHUNK_BYTES = 4 << 20  # a few of these keep a PCIe link busy
_WITH_BFLOAT16 = 14
_SLOTS = 3  # one being downloaded, one in work, one being uploaded

_idle: dict[int, list[Staging]] = {}
_results = Buffers()


class StagingSlot:
    """Pinned memory for one piece from the GPU and one piece to the GPU."""

    def __init__(self, cupy: Any):
        self.down = chunk(cupy)
        self.up = chunk(cupy)
        self.arrived = cupy.cuda.Event(disable_timing=True)
        self.released = cupy.cuda.Event(disable_timing=True)


class Staging:
    """The pinned memory and the two streams of one GPU, for one thread at a time."""

    def __init__(self, device: int):
        self._cupy = cupy = cupy_for("an array on a GPU")
        self._runtime = cupy.cuda.runtime
        with on_device(device):
            self._down = cupy.cuda.Stream(non_blocking=True)
            self._up = cupy.cuda.Stream(non_blocking=True)
            self._begun = cupy.cuda.Event(disable_timing=True)
            self._ended = cupy.cuda.Event(disable_timing=True)
            self.slots = [StagingSlot(cupy) for _ in range(_SLOTS)]

    def begin(self) -> None:
        """Order all following copies after the pending work of the caller's stream."""
        self._begun.record(self._cupy.cuda.get_current_stream())
        self._down.wait_event(self._begun)
        self._up.wait_event(self._begun)

    def end(self) -> None:
        """Order the next work of the caller's stream after all copies."""
        self._ended.record(self._up)
        self._cupy.cuda.get_current_stream().wait_event(self._ended)

    def settle(self) -> None:
        """Wait until all copies are done."""
        self._down.synchronize()
        self._up.synchronize()

    def fetch(self, slot: StagingSlot, source: int, nbytes: int) -> None:
        """Begin to copy from the GPU to a slot, after the slot's last upload is done."""
        slot.released.synchronize()
        self._runtime.memcpyAsync(address(slot.down), source, nbytes, self._runtime.memcpyDeviceToHost, self._down.ptr)
        slot.arrived.record(self._down)

    def send(self, slot: StagingSlot, host: np.ndarray, target: int) -> None:
        """Begin to copy ``host``, an array in a slot, to the GPU."""
        self._runtime.memcpyAsync(target, address(host), host.nbytes, self._runtime.memcpyHostToDevice, self._up.ptr)
        slot.released.record(self._up)


@contextmanager
def staging(device: int) -> Iterator[Staging]:
    """Yield the staging buffers of a GPU, and make it current. Copies keep their place in the caller's stream."""
    with lent(_idle, device, Staging) as stage, on_device(device):
        try:
            stage.begin()
            yield stage
            stage.end()
        except BaseException:
            stage.settle()
            raise


class StagedCopy(NamedTuple):
    """A piece of GPU memory that is copied to the host, processed there, and copied back."""

    # the address and the size of the piece on the GPU
    source: int
    nbytes: int
    # gets the piece and space for the result, both in pinned memory. Returns the result, a view of one of them.
    work: Callable[[np.ndarray, np.ndarray], np.ndarray]
    target: int  # the address on the GPU for the result


def through_host(stage: Staging, pieces: Sequence[StagedCopy]) -> None:
    """Process pieces on the host in order, while the next are downloaded and the last are uploaded."""
    slots = stage.slots
    ahead = len(slots) - 1
    for i in range(-ahead, len(pieces)):
        if i >= 0:
            slot = slots[i % len(slots)]
            slot.arrived.synchronize()
            stage.send(slot, pieces[i].work(slot.down[: pieces[i].nbytes], slot.up), pieces[i].target)
        if i + ahead < len(pieces):
            piece = pieces[i + ahead]
            stage.fetch(slots[(i + ahead) % len(slots)], piece.source, piece.nbytes)


def download(array: Any) -> np.ndarray:
    """Return a copy of a CuPy array on the host."""
    cupy = cupy_for("an array on a GPU")
    with on_device(array.device.id):
        array = cupy.ascontiguousarray(array)
    with staging(array.device.id) as stage:
        out = _results.empty(array.shape, array.dtype)
        flat = out.reshape(-1).view(np.uint8) if out.nbytes else np.empty(0, np.uint8)
        slots, source = stage.slots, int(array.data.ptr)
        starts = range(0, out.nbytes, CHUNK_BYTES)
        ahead = len(slots) - 1
        for i in range(-ahead, len(starts)):
            if i + ahead < len(starts):
                start = starts[i + ahead]
                nbytes = min(CHUNK_BYTES, out.nbytes - start)
                stage.fetch(slots[(i + ahead) % len(slots)], source + start, nbytes)
            if i >= 0:
                slot = slots[i % len(slots)]
                slot.arrived.synchronize()
                part = flat[starts[i] : starts[i] + CHUNK_BYTES]
                part[...] = slot.down[: len(part)]
    return out


def upload(array: np.ndarray, device: int) -> Any:
    """Return a copy of a host array on a GPU, ready for the next work of the caller's stream."""
    cupy = cupy_for("an array on a GPU")
    require_known(cupy, array.dtype)
    with on_device(device):
        out = cupy.empty(array.shape, array.dtype)  # pending work of the stream may still use the memory
    with staging(device) as stage:
        if array.nbytes:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for i, start in enumerate(range(0, array.nbytes, CHUNK_BYTES)):
                slot = stage.slots[i % len(stage.slots)]
                part = flat[start : start + CHUNK_BYTES]
                slot.released.synchronize()
                slot.up[: len(part)] = part
                stage.send(slot, slot.up[: len(part)], int(out.data.ptr) + start)
    return out


def require_known(cupy: Any, dtype: np.dtype) -> None:
    """Raise TypeError for bfloat16 and a CuPy that is too old."""
    if dtype.name == "bfloat16" and int(cupy.__version__.partition(".")[0]) < _WITH_BFLOAT16:
        raise TypeError(
            f"bfloat16 on a GPU needs CuPy {_WITH_BFLOAT16} or later (and NumPy 2.1.2 or later), not {cupy.__version__}"
        )


def chunk(cupy: Any) -> np.ndarray:
    """Return a new array of `CHUNK_BYTES` in pinned memory."""
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(CHUNK_BYTES), np.uint8, CHUNK_BYTES)


def address(array: np.ndarray) -> int:
    """Return the address of the first byte of a host array."""
    return array.__array_interface__["data"][0]


# --- feeds: copies to a GPU while it computes, on a separate stream -------------


_CHUNKS = 4  # in the ring of pinned memory: a thread fills one chunk while the others are copied
_ALIGNMENT = 256  # bytes, of an array in a chunk
_KEPT = 2  # times the arrays of a call: so many released arrays may wait for the GPU before a copy waits for one

_idle_feeds: dict[int, list[Feed]] = {}
_lost: list[Any] = []  # arrays whose end of use is unknown, which are never freed


class Sent(NamedTuple):
    """Arrays in a feed's memory, whose copies may be running, and the event after the last. For `received` only."""

    arrays: list[Any]
    ready: Any
    feed: Feed


class Feed:
    """The stream and the pinned memory by which one thread at a time sends arrays to a GPU.

    ``released`` has arrays that are not used any more, oldest first, each with the event of its release in the
    thread's stream.
    """

    def __init__(self, device: int):
        self.device = device
        self._cupy = cupy = cupy_for("an array on a GPU")
        with on_device(device):
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self._ring = [(chunk(cupy), cupy.cuda.Event(disable_timing=True)) for _ in range(_CHUNKS)]
        self._at = self._used = 0
        self.released: deque[tuple[Any, Any]] = deque()

    def send(self, arrays: Sequence[np.ndarray]) -> Sent:
        """Begin to copy arrays to the GPU. The caller may write to the arrays when this returns."""
        cupy = self._cupy
        for array in arrays:
            require_known(cupy, array.dtype)
        with on_device(self.device), self.stream:
            self.reclaim(_KEPT * len(arrays))
            out = []
            for array in arrays:
                out.append(cupy.empty(array.shape, array.dtype))
                if array.nbytes:
                    self._copy(np.ascontiguousarray(array).reshape(-1).view(np.uint8), int(out[-1].data.ptr))
            self._ring[self._at][1].record(self.stream)
            ready = cupy.cuda.Event(disable_timing=True)
            ready.record(self.stream)
        return Sent(out, ready, self)

    def _copy(self, data: np.ndarray, target: int) -> None:
        runtime, start = self._cupy.cuda.runtime, 0
        while start < len(data):
            room = CHUNK_BYTES - self._used
            if not room:
                room = self._next_chunk()
            part = data[start : start + room]
            memory = self._ring[self._at][0][self._used : self._used + len(part)]
            memory[...] = part
            runtime.memcpyAsync(target + start, address(memory), len(part), runtime.memcpyHostToDevice, self.stream.ptr)
            start += len(part)
            self._used += -(-len(part) // _ALIGNMENT) * _ALIGNMENT

    def _next_chunk(self) -> int:
        """Wait until the next chunk of the ring has been copied, switch to it, and return its size in bytes."""
        self._ring[self._at][1].record(self.stream)
        self._at, self._used = (self._at + 1) % _CHUNKS, 0
        self._ring[self._at][1].synchronize()
        return CHUNK_BYTES

    def reclaim(self, most: float = math.inf) -> None:
        """Free released arrays that the GPU no longer uses. Above ``most``, the stream waits for the oldest."""
        while self.released:
            try:
                event, memory = self.released.popleft()
            except IndexError:  # another thread took the last one
                return
            if event.done:
                continue
            if len(self.released) < most:
                self.released.appendleft((event, memory))
                return
            self.stream.wait_event(event)


def feed(device: int) -> AbstractContextManager[Feed]:
    """Return a context that gives a feed of a GPU."""
    return lent(_idle_feeds, device, Feed)


def received(sent: Sent) -> list[Any]:
    """Return the arrays for the caller's current stream, which waits for the copies. See CuPy for other streams."""
    cupy = cupy_for("an array on a GPU")
    with on_device(sent.feed.device):
        stream = cupy.cuda.get_current_stream()
        stream.wait_event(sent.ready)
        return [_lent(cupy, array, stream, sent.feed) for array in sent.arrays]


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
        self._feed.released.append((self._event, self._array))
        del self._array
        self._feed.reclaim()
