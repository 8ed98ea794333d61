"""The all-reduce by ``MPI_Iallreduce``, waited for at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.collectives.algorithms.contract import Cost, agreement_cost
from mpistrat.collectives.algorithms.mpi import MpiAllReduce
from mpistrat.runtime.topology import Topology


class MpiNonblockingAllReduce(MpiAllReduce):
    """The all-reduce by ``MPI_Iallreduce`` (MPI 4.1 section 6.12.7), in pieces of the size of the cache.

    The libraries implement it by point-to-point messages in a ring over all ranks. With their blocking all-reduce, by
    default, one rank of a node sends more than the minimum.
    """

    name = "mpi_nonblocking"

    def cost(self, topology: Topology) -> Cost:
        """Return the latency of a ring over all ranks plus the time for the minimum of bytes on the wire."""
        nodes = len(topology.nodes)
        if nodes == 1:
            blocking = super().cost(topology)
            return Cost(2 * blocking.fixed, 2 * blocking.per_byte)
        per_byte, ring = 2 * (nodes - 1) / nodes / 7.5e8, 2 * (topology.size - 1) * 5e-6
        return Cost(agreement_cost(topology) + 1e-5, per_byte, ring, topology.limits.chunk_bytes)

    def all_reduce(self, world: Any, send: Any, receive: np.ndarray, operation: Any) -> None:
        world.Iallreduce(send, receive, operation).Wait()
