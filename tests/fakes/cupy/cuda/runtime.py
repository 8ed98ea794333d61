"""The few functions of the CUDA runtime that the package calls. A test sets `gpus`, `driver` and `error`."""

import ctypes
import mmap
import os
import threading

import numpy as np

memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3

_rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "0"
own = [f"GPU {i} of rank {_rank}" for i in range(2)]
gpus = list(own)
driver = 12090
error = None
local = threading.local()
contexts = set()  # devices that have a context of this process, which takes memory there


class CUDARuntimeError(RuntimeError):
    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


def getDeviceCount():
    if error is not None:
        raise CUDARuntimeError(*error)
    return len(gpus)


def getDevice():
    return getattr(local, "device", 0)


def setDevice(device):
    """As of CUDA 12, this makes a context."""
    if device >= len(gpus):
        raise CUDARuntimeError(101, "cudaErrorInvalidDevice: invalid device ordinal")
    local.device = device
    touch()


def touch():
    """What is made, is made in the context of the current device."""
    local.context = True
    contexts.add(getDevice())


def memGetInfo():
    if error is not None:
        raise CUDARuntimeError(*error)
    touch()
    return (1 << 40) - allocated(), 1 << 40


def driverGetVersion():
    return driver


def runtimeGetVersion():
    return 12090


def getDeviceProperties(device):
    return {"name": b"fake", "uuid": gpus[device].encode(), "major": 9, "minor": 0}


cudaDevAttrMemoryClockRate, cudaDevAttrGlobalMemoryBusWidth = 36, 37


def deviceGetAttribute(attrib, device):
    return {36: 3_201_000, 37: 6144}[attrib]


def deviceGetPCIBusId(device):
    return f"0000:{device:02x}:00.0"


failed = False  # a test sets it: a kernel has used an illegal address


def eventQuery(event):
    """The status, which is not raised."""
    from cupy.cuda import event_of

    return 700 if failed else 0 if event_of(event).is_over() else 600


class _Copy:
    """A copy that waits. Until it is done nobody may change its source on the host, or read its target there."""

    def __init__(self, dst, src, size, kind):
        self.arguments = dst, src, size
        self.content = ctypes.string_at(src, size) if kind == memcpyHostToDevice else None
        if kind == memcpyDeviceToHost:
            ctypes.memset(dst, 255, size)

    def __call__(self):
        _, src, size = self.arguments
        if self.content is not None and ctypes.string_at(src, size) != self.content:
            raise AssertionError("pinned memory was changed before it was copied to the GPU")
        ctypes.memmove(*self.arguments)


def memcpyAsync(dst, src, size, kind, stream):
    from cupy.cuda import stream_of

    stream_of(stream).put(_Copy(dst, src, size, kind))


_allocations = {}  # bytes, by address


def new_memory(size):
    memory = mmap.mmap(-1, size)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    _allocations[address] = size
    return address, memory


def allocated():
    return sum(_allocations.values())


def forget(address):
    del _allocations[address]
