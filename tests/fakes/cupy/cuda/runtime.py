"""The few functions of the CUDA runtime that the package calls. A test sets `gpus`, `driver` and `error`."""

import ctypes
import os

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


def deviceGetPCIBusId(device):
    return f"0000:{device:02x}:00.0"


def memcpyAsync(dst, src, size, kind, stream):
    from cupy.cuda import stream_of

    stream_of(stream).put(lambda: ctypes.memmove(dst, src, size))
