"""The MPI library's own all-reduce."""

from __future__ import annotations

import math

import numpy as np

from mpistrat.collectives.algorithm import Algorithm
from mpistrat.runtime import mpi
from mpistrat.runtime.device import Device
from mpistrat.runtime.topology import Topology

# A piece that stays in the cache between the library's passes over it; it also keeps counts far below
# 2^31, which older libraries do not go beyond.
CHUNK_BYTES = 2 << 20


class MpiAllReduce(Algorithm):
    """``MPI_Allreduce`` (MPI 4.1 section 6.9.6) in pieces of the size of the cache."""

    name = "mpi"

    def supports(self, topology: Topology, dtype: np.dtype, device: Device) -> bool:
        return device.kind == "cpu" and dtype.kind in "iufc"

    def cost(self, topology: Topology, nbytes: int) -> float:
        """Latency per round of a recursive doubling, then the bytes that each rank must send."""
        within = topology.size == len(topology.nodes[0])
        latency, bandwidth = (1e-6, 5e9) if within else (5e-6, 1e9)
        size = topology.size
        return math.ceil(math.log2(size)) * latency + 2 * (size - 1) / size * nbytes / bandwidth

    def sum(self, topology: Topology, send: np.ndarray, receive: np.ndarray) -> None:
        all_reduce, in_place = topology.world.Allreduce, send is receive
        if send.nbytes <= CHUNK_BYTES:
            all_reduce(mpi.start().IN_PLACE if in_place else send, receive)
            return
        step = max(1, CHUNK_BYTES // send.itemsize)
        send, receive = send.reshape(-1), receive.reshape(-1)
        for start in range(0, len(send), step):
            piece = receive[start : start + step]
            all_reduce(mpi.start().IN_PLACE if in_place else send[start : start + step], piece)
