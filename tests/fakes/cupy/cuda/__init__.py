"""Devices, streams, events and memory, with CUDA's rules about their order.

A stream is a queue of what is to be done. Nothing is done until somebody waits for it, the latest order that CUDA
allows. A test sets `order` to "early" for the other extreme: then every stream whose `late` is false does at once what
it may do. A program that lacks a wait fails in one of the two. Memory that is given back is filled with NaN, in the
order of its stream.
"""

import sys
import threading
import warnings
import weakref

import numpy as np

from cupy.cuda import driver, nvrtc, runtime

__all__ = ["Device", "Event", "ExternalStream", "Stream", "driver", "nvrtc", "runtime"]

_local = threading.local()
_one_at_a_time = threading.RLock()
_works = []  # what all streams have to do
_streams = {}  # by number
_events = weakref.WeakValueDictionary()  # by number
_nulls = {}  # the work of stream 0, by device
_kept = []
_pool = {}  # by device, stream and size
order = "late"
contexts = runtime.contexts


def begin_anew():
    """Forget all that is waiting, all memory and all contexts."""
    for work in _works:
        work.waiting.clear()
    for each in (_works, _nulls, _kept, _pool, contexts):
        each.clear()
    for name in list(vars(runtime.local)):
        delattr(runtime.local, name)


def keep(memory):
    """Hold memory that was given up while copies to it may be waiting."""
    if not any(work.waiting for work in _works):
        _kept.clear()
    _kept.append(memory)


def take(size):
    """Memory of the current stream's, what was given up there first, as CuPy's pool has it; and what to `give`."""
    runtime.touch()
    work = get_current_stream().work
    free = _pool.setdefault((work, size), [])
    return (free.pop() if free else np.full(size, 255, np.uint8)), (work, size)


def give(memory, key):
    """Memory that was given up is used again at once: other streams that still use it should have been waited for."""
    with _one_at_a_time:
        key[0].waiting.append(lambda: memory.fill(255))
        _pool.setdefault(key, []).append(memory)


class Device:
    def __init__(self, device=None):
        self.id = runtime.getDevice() if device is None else int(device)
        if self.id >= runtime.getDeviceCount():
            raise runtime.CUDARuntimeError(101, "cudaErrorInvalidDevice: invalid device ordinal")

    def use(self):
        runtime.setDevice(self.id)

    @property
    def mem_info(self):
        with self:
            return runtime.memGetInfo()

    def synchronize(self):
        for work in _works:
            if work.device == self.id:
                work.advance()

    def __enter__(self):
        if not hasattr(_local, "left"):
            _local.left = []
        _local.left.append(runtime.getDevice())
        self.use()
        return self

    def __exit__(self, *_):
        runtime.setDevice(_local.left.pop())  # always, as CuPy does

    def __int__(self):
        return self.id


class Work:
    """What a stream of one device has to do. Stream 0 (`null`) and streams that are blocking wait for each other."""

    def __init__(self, device, blocking, null=False):
        self.device, self.blocking, self.null, self.late = device, blocking, null, null
        self.waiting, self.done, self.at_work = [], 0, False
        _works.append(self)

    @property
    def end(self):
        return self.done + len(self.waiting)

    def put(self, item):
        with _one_at_a_time:
            for other in _works if self.blocking else ():
                if (other.device, other.blocking) == (self.device, True) and other.null != self.null:
                    self.waiting.append(Wait(other, other.end))
            self.waiting.append(item)
            progress()

    def advance(self, place=None):
        with _one_at_a_time:
            place = self.end if place is None else place
            while self.done < place:
                self.done += 1
                item, self.at_work = self.waiting.pop(0), True
                try:
                    item()
                finally:
                    self.at_work = False
            progress()

    def may_go_on(self):
        if not self.waiting or self.at_work:
            return False
        return not isinstance(self.waiting[0], Wait) or self.waiting[0].is_over()


class Wait:
    def __init__(self, work, place):
        self.work, self.place = work, place

    def is_over(self):
        return self.work.done >= self.place

    def __call__(self):
        self.work.advance(self.place)


def progress():
    """In the early order, do all that streams may do which are not late."""
    if order != "early" or getattr(_local, "in_progress", False):
        return
    _local.in_progress = True
    try:
        while able := [work for work in _works if not work.late and work.may_go_on()]:
            able[0].advance(able[0].done + 1)
    finally:
        _local.in_progress = False


class Event:
    _PATIENCE = 50
    _numbers = iter(range(1, 1 << 30))

    def __init__(self, block=False, disable_timing=False):
        runtime.touch()
        self.device = runtime.getDevice()
        self._wait, self._asked = None, 0
        self.ptr = next(self._numbers)
        _events[self.ptr] = self

    def record(self, stream=None):
        work = (stream or get_current_stream()).work
        if work.device != self.device:
            raise runtime.CUDARuntimeError(400, "cudaErrorInvalidResourceHandle: invalid resource handle")
        with _one_at_a_time:
            self._wait, self._asked = Wait(work, work.end), 0

    @property
    def done(self):
        """No error is raised."""
        return runtime.eventQuery(self.ptr) == 0

    def is_over(self):
        """Nothing is done until somebody waits, or has asked for long."""
        if self._wait is None or self._wait.is_over():
            return True
        self._asked += 1
        if self._asked > self._PATIENCE and not _hangs():
            self.synchronize()
            return True
        return False

    def synchronize(self):
        if runtime.failed:
            raise runtime.CUDARuntimeError(700, "cudaErrorIllegalAddress: an illegal memory access was encountered")
        if self._wait is not None:
            self._wait()


def event_of(ptr):
    return _events[ptr]


def _hangs():
    from cupy.cuda import nccl

    return nccl.hangs


class Stream:
    _numbers = iter(range(1, 1 << 30))

    def __init__(self, null=False, non_blocking=False):
        self.ptr = 0 if null else next(self._numbers)
        _streams[self.ptr] = self
        if not null:
            runtime.touch()
            self._work = Work(runtime.getDevice(), not non_blocking)

    @property
    def work(self):
        """Of stream 0, that of the current device."""
        if self.ptr:
            return self._work
        device = runtime.getDevice()
        if device not in _nulls:
            _nulls[device] = Work(device, True, null=True)
        return _nulls[device]

    queue = property(lambda self: self.work.waiting)

    @property
    def done(self):
        if not _hangs():
            self.synchronize()
        return not _hangs()

    def put(self, item):
        self.work.put(item)

    def synchronize(self):
        self.work.advance()

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        if event._wait is not None and event._wait.work is not self.work:
            self.put(event._wait)

    @classmethod
    def from_external(cls, obj):
        """Of version 14, where `ExternalStream` is deprecated. A test takes it away."""
        version, ptr = obj.__cuda_stream__()
        assert version == 0
        return _streams[ptr]

    def __enter__(self):
        device = runtime.getDevice()
        if self.work.device != device:
            raise RuntimeError(
                f"The device that the stream is created on ({self.work.device}) does not match with the current device "
                f"({device})"
            )
        if not hasattr(_local, "streams"):
            _local.streams = []
        _local.streams.append(self)
        return self

    def __exit__(self, *_):
        _local.streams.pop()


class ExternalStream:
    def __init__(self, ptr, device_id=-1):
        if hasattr(Stream, "from_external"):
            warnings.warn("ExternalStream is deprecated. Use Stream.from_external()", DeprecationWarning, stacklevel=2)
        self.ptr, self.device_id = ptr, device_id

    def __enter__(self):
        return _streams[self.ptr].__enter__()

    def __exit__(self, *_):
        _streams[self.ptr].__exit__()


Stream.null = Stream(null=True)


def get_current_stream(device_id=-1):
    device = runtime.getDevice() if device_id == -1 else device_id
    for stream in reversed(getattr(_local, "streams", [])):
        if stream.work.device == device:
            return stream
    return Stream.null


def stream_of(ptr):
    return _streams[ptr]


def alloc_pinned_memory(size):
    return memoryview(np.empty(size, np.uint8))


class Memory:
    """Of its own, outside of the pool."""

    def __init__(self, size):
        runtime.touch()
        self.size, self.device_id = size, Device().id
        self.ptr, self._map = runtime.new_memory(size)

    def __del__(self):
        if sys.is_finalizing():
            return
        for work in _works:  # as cudaFree does
            work.advance()
        runtime.forget(self.ptr)


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)
