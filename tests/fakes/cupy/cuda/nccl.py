"""NCCL's interface, by MPI over all ranks (or this one alone)."""

import ctypes

import numpy as np
from mpi4py import MPI

from cupy.cuda import runtime, stream_of

available = True
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)
_DTYPES = ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
_OPS = [MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN]
calls = []  # (number of elements, dtype) of each all-reduce
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
        told = (MPI.COMM_WORLD if ndev > 1 else MPI.COMM_SELF).allgather(runtime.gpus)
        if len({gpus[0] for gpus in told}) < ndev:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: two ranks on one device")
        self._comm = (MPI.COMM_WORLD if ndev > 1 else MPI.COMM_SELF).Dup()
        self.aborted = self.destroyed = False

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        stream_of(stream).synchronize()  # NCCL goes on by itself, MPI in a queue would not
        dtype = np.dtype(_DTYPES[datatype])
        calls.append((count, dtype))
        if hangs:
            return
        send, receive = (_memory(each, count, dtype) for each in (sendbuf, recvbuf))
        self._comm.Allreduce(MPI.IN_PLACE if sendbuf == recvbuf else send, receive, _OPS[op])

    def check_async_error(self):
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
