"""The all-reduces of MPI: the blocking one, the non-blocking one, and one in two tiers."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from mpistrat.collectives.algorithms.contract import Algorithm, Cost, agreement_cost
from mpistrat.process import mpi
from mpistrat.runtime.topology import Topology

_OPERATIONS = {"add": "SUM", "multiply": "PROD", "maximum": "MAX", "minimum": "MIN"}


@cache
def mpi_operation(combine: np.ufunc, dtype: np.dtype) -> Any:
    """Return the MPI operation of a ufunc. Extremes are our own operation, since MPI's may ignore NaN."""
    MPI = mpi.start()
    # Integers have no NaN, so MPI's own extremes are right for them.
    if combine in (np.add, np.multiply) or dtype.kind in "iu":
        return getattr(MPI, _OPERATIONS[combine.__name__])

    def extreme(invec: Any, inoutvec: Any, datatype: Any) -> None:
        total = np.frombuffer(inoutvec, dtype)
        combine(np.frombuffer(invec, dtype), total, out=total)

    return MPI.Op.Create(extreme, commute=True)


class MpiAllReduce(Algorithm):
    """The all-reduce by ``MPI_Allreduce`` (MPI 4.1 section 6.9.6), in pieces that stay in the cache."""

    name = "mpi"

    def cost(self, topology: Topology) -> Cost:
        """Return the latency of recursive doubling plus the time for the bytes, near the minimum on two nodes only."""
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
        sendbuf = mpi.start().IN_PLACE if send is receive else send
        self.all_reduce(topology.world, sendbuf, receive, mpi_operation(combine, receive.dtype))

    def all_reduce(self, world: Any, send: Any, receive: np.ndarray, operation: Any) -> None:
        """Call ``MPI_Allreduce`` and wait for the result."""
        world.Allreduce(send, receive, operation)


class MpiNonblockingAllReduce(MpiAllReduce):
    """The all-reduce by ``MPI_Iallreduce`` (MPI 4.1 section 6.12.7), in pieces of the size of the cache.

    Libraries send in a ring over all ranks. In their blocking one, a rank of a node sends more than the minimum.
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
            # Only leaders have a node's sum; on the others ``receive`` is first written by the broadcast.
            node.Reduce(send, None, op, root=0)
        else:
            node.Reduce(MPI.IN_PLACE if send is receive else send, receive, op, root=0)
            if leaders.size > 1:
                leaders.Allreduce(MPI.IN_PLACE, receive, op)
        node.Bcast(receive, root=0)
