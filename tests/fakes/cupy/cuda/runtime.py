"""The few functions of the CUDA runtime that the package calls. A test sets `gpus`, `driver` and `error`."""

import ctypes
import mmap
import os

import numpy as np

memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3

_rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "0"
own = [f"GPU {i} of rank {_rank}" for i in range(2)]
gpus = list(own)
driver = 12090
error = None


class CUDARuntimeError(RuntimeError):
    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


def getDeviceCount():
    if error is not None:
        raise CUDARuntimeError(*error)
    return len(gpus)


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


class _Copy:
    def __init__(self, *arguments):
        self.arguments = arguments

    def __call__(self):
        ctypes.memmove(*self.arguments)


def memcpyAsync(dst, src, size, kind, stream):
    from cupy.cuda import stream_of

    stream_of(stream).put(_Copy(dst, src, size))


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
