"""The all-reduce by ``MPI_Allreduce``."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from mpistrat.collectives.algorithms.contract import Algorithm, Cost, agreement_cost
from mpistrat.runtime.process import mpi
from mpistrat.runtime.topology import Topology

_OPERATIONS = {"add": "SUM", "multiply": "PROD", "maximum": "MAX", "minimum": "MIN"}


@cache
def mpi_operation(combine: np.ufunc, dtype: np.dtype) -> Any:
    """Return the MPI operation of a ufunc. Extremes are our own operation, since those of MPI may ignore NaN."""
    MPI = mpi.start()
    if combine in (np.add, np.multiply) or dtype.kind in "iu":
        return getattr(MPI, _OPERATIONS[combine.__name__])

    def extreme(theirs: Any, mine: Any, datatype: Any) -> None:
        total = np.frombuffer(mine, dtype)
        combine(np.frombuffer(theirs, dtype), total, out=total)

    return MPI.Op.Create(extreme, commute=True)


class MpiAllReduce(Algorithm):
    """The all-reduce by ``MPI_Allreduce`` (MPI 4.1 section 6.9.6).

    A piece stays in the cache between the passes of the library. It also keeps counts far below 2^31, the limit of
    older libraries.
    """

    name = "mpi"

    def cost(self, topology: Topology) -> Cost:
        """Return the latency of a recursive doubling plus the time for the bytes that each rank or node sends.

        The defaults of the libraries send near the minimum of bytes between two nodes, and far more between more.
        """
        size, nodes = topology.size, len(topology.nodes)
        rounds = math.ceil(math.log2(size))
        if nodes == 1:
            return Cost(rounds * 1e-6, 2 * (size - 1) / size / 5e9)
        per_byte = 2 * (nodes - 1) / nodes / (8.5e8 if nodes == 2 else 4e8)
        return Cost(agreement_cost(topology), per_byte, rounds * 5e-5, topology.limits.chunk_bytes)

    def piece_bytes(self, topology: Topology) -> int:
        return topology.limits.chunk_bytes

    def reduce(self, topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
        if send.dtype != receive.dtype:
            receive[...] = send
            send = receive
        mine = mpi.start().IN_PLACE if send is receive else send
        self.all_reduce(topology.world, mine, receive, mpi_operation(combine, receive.dtype))

    def all_reduce(self, world: Any, send: Any, receive: np.ndarray, operation: Any) -> None:
        """Call ``MPI_Allreduce`` and wait for the result."""
        world.Allreduce(send, receive, operation)
