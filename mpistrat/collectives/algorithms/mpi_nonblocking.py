"""The MPI library's non-blocking all-reduce, waited for at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpistrat.collectives.algorithms.contract import agreement_cost
from mpistrat.collectives.algorithms.mpi import MpiAllReduce
from mpistrat.runtime.topology import Topology


class MpiNonblockingAllReduce(MpiAllReduce):
    """``MPI_Iallreduce`` (MPI 4.1 section 6.12.7) in pieces of the size of the cache.

    The libraries make it of point-to-point messages in a ring over all ranks. Their blocking one, by default, lets
    one rank of a node send more than the least there can be.
    """

    name = "mpi_nonblocking"

    def cost(self, topology: Topology, nbytes: int) -> float:
        """Steps of a ring over all ranks, made by the library, and the least bytes on the wire."""
        nodes = len(topology.nodes)
        if nodes == 1:
            return 2 * super().cost(topology, nbytes)
        steps = math.ceil(nbytes / topology.limits.chunk_bytes) * 2 * (topology.size - 1) * 5e-6
        return agreement_cost(topology) + 1e-5 + steps + 2 * (nodes - 1) / nodes * nbytes / 7.5e8

    def all_reduce(self, world: Any, send: Any, receive: np.ndarray, operation: Any) -> None:
        world.Iallreduce(send, receive, operation).Wait()
