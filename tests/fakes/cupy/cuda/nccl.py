"""NCCL's interface, by MPI over all ranks (or this one alone)."""

import ctypes
import functools
import threading

import numpy as np

from cupy.cuda import runtime, stream_of

available = True
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)
_DTYPES = ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "bfloat16"]
_OPS = ["SUM", "PROD", "MAX", "MIN", "SUM"]
calls = []  # (number of elements, dtype, op) of each all-reduce
hangs = False  # a test sets it: no all-reduce is ever done
id_error = ""  # a test sets it: no id can be made
async_error = ""  # a test sets it: what was noticed meanwhile


class NcclError(RuntimeError):
    pass


def get_unique_id():
    if id_error:
        raise NcclError(id_error)
    return bytes(range(128))


class NcclCommunicator:
    def __init__(self, ndev, commId, rank):
        if commId != bytes(range(128)):
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT")
        self._size, self._comm, self._device = ndev, None, runtime.getDevice()
        if ndev > 1:
            from mpi4py import MPI

            if len({gpus[0] for gpus in MPI.COMM_WORLD.allgather(runtime.gpus)}) < ndev:
                raise NcclError("NCCL_ERROR_INVALID_USAGE: two ranks on one device")
            self._comm = MPI.COMM_WORLD.Dup()
        self.aborted = self.destroyed = False
        self._in_use = threading.Lock()

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        """Read the buffer at once, after what its stream has to do: MPI in a queue would not go on by itself. The
        result comes in the stream's order.
        """
        if self.aborted or self.destroyed:
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: this communicator has ended")
        if runtime.getDevice() != self._device:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: another device is current")
        if not self._in_use.acquire(blocking=False):
            raise NcclError("NCCL_ERROR_INVALID_USAGE: two threads at once")
        try:
            stream_of(stream).synchronize()
            dtype = np.dtype(_DTYPES[datatype])
            calls.append((count, dtype, op))
            total = _memory(sendbuf, count, dtype).copy()
            if op == NCCL_AVG:  # before the sum: small numbers of half precision are lost
                total = (total * dtype.type(1 / self._size)).astype(dtype)
            if self._comm is not None and not hangs:
                from mpi4py import MPI

                if dtype.itemsize == 2:  # rounded at each step, as in a ring
                    total = functools.reduce(np.add, self._comm.allgather(total))
                else:
                    self._comm.Allreduce(MPI.IN_PLACE, total, getattr(MPI, _OPS[op]))
            hung = hangs
        finally:
            self._in_use.release()

        def arrive():
            if not hung:
                _memory(recvbuf, count, dtype)[...] = total
            elif not self.aborted:
                raise AssertionError("the program waits for an all-reduce that never ends")

        stream_of(stream).put(arrive)

    def check_async_error(self):
        if self.aborted or self.destroyed:
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: this communicator has ended")
        if isinstance(async_error, int):
            raise KeyError(async_error)
        if async_error:
            raise NcclError(async_error)

    def abort(self):
        self.aborted = True

    def destroy(self):
        self.destroyed = True


def _memory(address, count, dtype):
    array = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(array, dtype, count)
