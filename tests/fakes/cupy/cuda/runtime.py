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


# Memory of the host that is registered in this process.
_registered = {}  # by address: bytes
register_error = ""  # a test sets it: no memory can be registered


def hostRegister(ptr, size, flags):
    if register_error:
        raise CUDARuntimeError(801, register_error)
    if any(ptr < end and start < ptr + size for start, end in _registered.items()):
        raise CUDARuntimeError(712, "cudaErrorHostMemoryAlreadyRegistered")
    ctypes.string_at(ptr + size - 1, 1)  # it is there
    _registered[ptr] = ptr + size


def hostUnregister(ptr):
    from cupy.cuda import _streams

    if ptr not in _registered:
        raise CUDARuntimeError(713, "cudaErrorHostMemoryNotRegistered")
    end = _registered.pop(ptr)
    ctypes.string_at(end - 1, 1)  # and still is
    for stream in _streams.values():
        for each in stream.queue:
            if isinstance(each, _Copy) and any(ptr <= place < end for place in each.arguments[:2]):
                raise CUDARuntimeError(1, "a copy of this memory is not done")


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
