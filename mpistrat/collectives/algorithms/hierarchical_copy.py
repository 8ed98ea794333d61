"""The all-reduce of two tiers by MPI: to each node's leader, between the leaders, and back."""

from __future__ import annotations

import math

import numpy as np

from mpistrat.collectives.algorithms.contract import Algorithm, Cost
from mpistrat.collectives.algorithms.mpi import mpi_operation
from mpistrat.runtime.process import mpi
from mpistrat.runtime.topology import Topology


class HierarchicalCopy(Algorithm):
    """The all-reduce by ``MPI_Reduce`` to leaders, ``MPI_Allreduce`` between them and ``MPI_Bcast`` from them."""

    name = "hierarchical_copy"
    by_name_only = True

    def cost(self, topology: Topology) -> Cost:
        """Return the time of a reduce and a broadcast inside the node, plus each leader's time on the wire."""
        nodes = len(topology.nodes)
        inside = 2 * math.ceil(math.log2(max(topology.ranks_per_node)))
        between = math.ceil(math.log2(nodes))
        return Cost(inside * 1e-6 + between * 5e-6, inside / 5e9 + 2 * (nodes - 1) / nodes / 1e9)

    def piece_bytes(self, topology: Topology) -> int:
        return topology.limits.chunk_bytes

    def reduce(self, topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
        MPI = mpi.start()
        node, leaders, op = topology.node, topology.leaders, mpi_operation(combine, receive.dtype)
        if send.dtype != receive.dtype:
            receive[...] = send
            send = receive
        if leaders is None:
            node.Reduce(send, None, op, root=0)
        else:
            node.Reduce(MPI.IN_PLACE if send is receive else send, receive, op, root=0)
            if leaders.size > 1:
                leaders.Allreduce(MPI.IN_PLACE, receive, op)
        node.Bcast(receive, root=0)
