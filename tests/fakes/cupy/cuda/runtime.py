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


def memcpyAsync(dst, src, size, kind, stream):
    from cupy.cuda import stream_of

    stream_of(stream).put(lambda: ctypes.memmove(dst, src, size))


# Memory of a GPU that other processes open: a file, named by the process and its number there.
_files = {}  # by address: file descriptor
_opened = {}  # by address: map
ipc_error = ""  # a test sets it: no memory of another process can be opened


def new_memory(size):
    descriptor = os.memfd_create("fake-cuda")
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    _files[address] = descriptor
    return address, memory


def allocated():
    return sum(os.fstat(descriptor).st_size for descriptor in _files.values())


def forget(address):
    os.close(_files.pop(address))


def ipcGetMemHandle(devPtr):
    if devPtr not in _files:
        raise CUDARuntimeError(1, "cudaErrorInvalidValue: not the beginning of an allocation")
    return f"{os.getpid()} {_files[devPtr]}".encode().ljust(64, b"\0")


def ipcOpenMemHandle(handle, flags=1):
    process, descriptor = map(int, handle.rstrip(b"\0").split())
    if ipc_error or process == os.getpid():
        raise CUDARuntimeError(217, ipc_error or "cudaErrorDeviceUninitialized: of this process itself")
    with open(f"/proc/{process}/fd/{descriptor}", "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    _opened[address] = memory
    return address


def ipcCloseMemHandle(devPtr):
    del _opened[devPtr]
