"""The ordered all-reduce: the same bits for any nodes, pieces and MPI library, by the order of ranks."""

from __future__ import annotations

from functools import partial

import numpy as np

from mpistrat.collectives.algorithms.contract import Algorithm, Cost
from mpistrat.collectives.algorithms.hierarchical import HierarchicalAllReduce
from mpistrat.collectives.algorithms.tree import combine_by_slices
from mpistrat.collectives.arithmetic.combine_rows import combine_rows
from mpistrat.runtime.topology import Topology

_PIECE_BYTES = 4 << 20
_GATHERED_BYTES = 256 << 10  # of all ranks together; up to this size every rank combines all values

_in_memory = HierarchicalAllReduce()


class OrderedAllReduce(Algorithm):
    """The all-reduce that computes ``((rank 0 + rank 1) + rank 2) + ...`` for every element.

    On one node `HierarchicalAllReduce` has this order already. Else every rank combines a slice of all ranks' values.
    """

    name = "ordered"
    by_name_only = True

    def cost(self, topology: Topology) -> Cost:
        return Cost(2e-6 * topology.size, 2 / 1e9)

    def piece_bytes(self, topology: Topology) -> int:
        return _in_memory.piece_bytes(topology) if topology.shares_all else _PIECE_BYTES

    def reduce(self, topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
        # The ranks wait in MPI from here on unless they share memory. A rank that is interrupted then cannot tell the
        # others by a meeting: the lock must know, see `CollectiveLock.only_meets`.
        topology.lock.only_meets = topology.shares_all
        if topology.lock.only_meets:
            _in_memory.reduce(topology, combine, send, receive)
        elif send.nbytes * topology.size <= _GATHERED_BYTES:
            _gather_and_combine(topology, combine, send, receive)
        else:
            combine_by_slices(topology.world, [send], [1] * topology.size, receive, partial(combine_rows, combine))


def _gather_and_combine(topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
    everything = np.empty((topology.size, len(send)), send.dtype)
    # As bytes: MPI has no datatype for float16, and mpi4py refuses bfloat16.
    topology.world.Allgather(send.view(np.uint8), everything.view(np.uint8))
    combine_rows(combine, list(everything), receive)
