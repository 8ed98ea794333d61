"""Devices, streams and events. A stream is a queue of what is to be done; to wait for it is to do it."""

import sys
import threading

import numpy as np

from cupy.cuda import runtime

_local = threading.local()
_one_at_a_time = threading.RLock()
_streams = {}
_kept = []
_pool = {}  # by device, stream and size


def keep(memory):
    """Hold memory that was given up while copies to it may be waiting."""
    if not any(stream.queue for stream in _streams.values()):
        _kept.clear()
    _kept.append(memory)


def take(size):
    """Memory of the current stream's, what was given up there first, as CuPy's pool has it; and what to `give`."""
    key = Device().id, get_current_stream().ptr, size
    free = _pool.setdefault(key, [])
    return (free.pop() if free else np.empty(size, np.uint8)), key


def give(memory, key):
    """Memory that was given up is used again at once: other streams that still use it should have been waited for."""
    _pool[key].append(memory)


class Device:
    def __init__(self, device=None):
        self.id = getattr(_local, "device", 0) if device is None else int(device)
        if self.id >= runtime.getDeviceCount():
            raise runtime.CUDARuntimeError(101, "cudaErrorInvalidDevice: invalid device ordinal")

    def use(self):
        _local.device = self.id

    @property
    def mem_info(self):
        if runtime.error is not None:
            raise runtime.CUDARuntimeError(*runtime.error)
        return (1 << 40) - runtime.allocated(), 1 << 40

    def synchronize(self):
        for stream in list(_streams.values()):
            stream.synchronize()

    def __enter__(self):
        if not hasattr(_local, "left"):
            _local.left = []
        _local.left.append(getattr(_local, "device", 0))
        self.use()
        return self

    def __exit__(self, *_):
        _local.device = _local.left.pop()

    def __int__(self):
        return self.id


class Event:
    def __init__(self, block=False, disable_timing=False):
        self._stream, self._place = None, 0

    def record(self, stream=None):
        with _one_at_a_time:
            self._stream = stream or get_current_stream()
            self._place = self._stream.done_so_far + len(self._stream.queue)

    @property
    def done(self):
        """Nothing is done until somebody waits: who asks again and again asks for ever."""
        return self._stream is None or self._stream.done_so_far >= self._place

    def synchronize(self):
        if self._stream is not None:
            self._stream.advance(self._place)


class Stream:
    _numbers = iter(range(1, 1 << 30))

    def __init__(self, null=False, non_blocking=False):
        self.queue, self.done_so_far = [], 0
        self.ptr = 0 if null else next(self._numbers)
        _streams[self.ptr] = self

    @property
    def done(self):
        from cupy.cuda import nccl

        if not nccl.hangs:
            self.synchronize()
        return not nccl.hangs

    def put(self, work):
        self.queue.append(work)

    def advance(self, place):
        with _one_at_a_time:
            while self.done_so_far < place:
                self.done_so_far += 1
                self.queue.pop(0)()

    def synchronize(self):
        with _one_at_a_time:
            self.advance(self.done_so_far + len(self.queue))

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        stream, place = event._stream, event._place
        if stream is not None and stream is not self:
            self.put(lambda: stream.advance(place))

    def __enter__(self):
        if not hasattr(_local, "streams"):
            _local.streams = []
        _local.streams.append(self)
        return self

    def __exit__(self, *_):
        _local.streams.pop()


Stream.null = Stream(null=True)


def get_current_stream():
    return (getattr(_local, "streams", None) or [Stream.null])[-1]


def stream_of(ptr):
    return _streams[ptr]


def alloc_pinned_memory(size):
    return memoryview(np.empty(size, np.uint8))


class Memory:
    """Of its own, outside of the pool."""

    def __init__(self, size):
        self.size, self.device_id = size, Device().id
        self.ptr, self._map = runtime.new_memory(size)

    def __del__(self):
        if sys.is_finalizing():
            return
        Device().synchronize()  # as cudaFree does
        runtime.forget(self.ptr)


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id
