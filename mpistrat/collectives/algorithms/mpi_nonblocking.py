"""The all-reduce by ``MPI_Iallreduce``, waited for at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpistrat.collectives.algorithms.contract import agreement_cost
from mpistrat.collectives.algorithms.mpi import MpiAllReduce
from mpistrat.runtime.topology import Topology


class MpiNonblockingAllReduce(MpiAllReduce):
    """The all-reduce by ``MPI_Iallreduce`` (MPI 4.1 section 6.12.7), in pieces of the size of the cache.

    The libraries implement it by point-to-point messages in a ring over all ranks. With their blocking all-reduce, by
    default, one rank of a node sends more than the minimum.
    """

    name = "mpi_nonblocking"

    def cost(self, topology: Topology, nbytes: int) -> float:
        """Return the latency of a ring over all ranks plus the time for the minimum of bytes on the wire."""
        nodes = len(topology.nodes)
        if nodes == 1:
            return 2 * super().cost(topology, nbytes)
        steps = math.ceil(nbytes / topology.limits.chunk_bytes) * 2 * (topology.size - 1) * 5e-6
        return agreement_cost(topology) + 1e-5 + steps + 2 * (nodes - 1) / nodes * nbytes / 7.5e8

    def all_reduce(self, world: Any, send: Any, receive: np.ndarray, operation: Any) -> None:
        world.Iallreduce(send, receive, operation).Wait()
