"""The MPI library's own all-reduce."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from mpistrat.collectives.algorithms.contract import Algorithm, agreement_cost
from mpistrat.runtime.device import Device
from mpistrat.runtime.process import mpi
from mpistrat.runtime.topology import Topology

# A piece that stays in the cache between the library's passes over it; it also keeps counts far below
# 2^31, which older libraries do not go beyond.

_OPERATIONS = {"add": "SUM", "multiply": "PROD", "maximum": "MAX", "minimum": "MIN"}


@cache
def mpi_operation(combine: np.ufunc, dtype: np.dtype) -> Any:
    """MPI's operation that does what a ufunc does. MPI's own extremes may overlook what is not a number."""
    MPI = mpi.start()
    if combine in (np.add, np.multiply) or dtype.kind in "iu":
        return getattr(MPI, _OPERATIONS[combine.__name__])

    def extreme(theirs: Any, mine: Any, datatype: Any) -> None:
        total = np.frombuffer(mine, dtype)
        combine(np.frombuffer(theirs, dtype), total, out=total)

    return MPI.Op.Create(extreme, commute=True)


class MpiAllReduce(Algorithm):
    """``MPI_Allreduce`` (MPI 4.1 section 6.9.6) in pieces of the size of the cache."""

    name = "mpi"

    def supports(self, topology: Topology, dtype: np.dtype, device: Device) -> bool:
        return device.kind == "cpu" and dtype.kind in "iufc"

    def cost(self, topology: Topology, nbytes: int) -> float:
        """Latency per round of a recursive doubling, then the bytes that each rank or each node must send.

        The libraries' defaults are near the least number of bytes between two nodes, and far from it between
        more.
        """
        size, nodes = topology.size, len(topology.nodes)
        rounds = math.ceil(math.log2(size))
        if nodes == 1:
            return rounds * 1e-6 + 2 * (size - 1) / size * nbytes / 5e9
        bandwidth = 8.5e8 if nodes == 2 else 4e8
        latency = math.ceil(nbytes / topology.limits.chunk_bytes) * rounds * 5e-5
        return agreement_cost(topology) + latency + 2 * (nodes - 1) / nodes * nbytes / bandwidth

    def piece_bytes(self, topology: Topology) -> int:
        return topology.limits.chunk_bytes

    def reduce(self, topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
        if send.dtype != receive.dtype:
            receive[...] = send
            send = receive
        mine = mpi.start().IN_PLACE if send is receive else send
        self.all_reduce(topology.world, mine, receive, mpi_operation(combine, receive.dtype))

    def all_reduce(self, world: Any, send: Any, receive: np.ndarray, operation: Any) -> None:
        """The call of MPI, waited for."""
        world.Allreduce(send, receive, operation)
