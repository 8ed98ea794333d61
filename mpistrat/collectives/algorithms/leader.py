"""The all-reduce by the leaders of nodes, for small messages, and the one in the order of ranks, for equal bits."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from mpistrat.collectives.algorithms.contract import Algorithm, Cost, Meeting
from mpistrat.collectives.algorithms.hierarchical import HierarchicalAllReduce
from mpistrat.collectives.algorithms.tree import combine_by_slices
from mpistrat.collectives.arithmetic.fixed_tree import combine_rows
from mpistrat.runtime.agreement.agreement import PAYLOAD_BYTES, Payload
from mpistrat.runtime.topology import Topology

_PIECE_BYTES = 4 << 20
_GATHERED_BYTES = 256 << 10  # of all ranks together; up to this size every rank combines all values

_in_memory = HierarchicalAllReduce()


class LeaderAllReduce(Algorithm):
    """The all-reduce in which each leader adds the slots of its node, and the sums travel with the agreement."""

    name = "leader"
    meets = True

    def fits(self, topology: Topology) -> bool:
        return topology.memory is not None

    def cost(self, topology: Topology) -> Cost:
        """Return the time of one exchange of each piece for each doubling of the number of nodes."""
        doublings = math.ceil(math.log2(len(topology.nodes)))
        per_byte = max(topology.ranks_per_node) / 12e9 + doublings / 5e8
        return Cost(1e-6, per_byte, doublings * 1e-5, self.piece_bytes(topology))

    def piece_bytes(self, topology: Topology) -> int:
        return min(PAYLOAD_BYTES, topology.node_memory.slot_bytes)

    def reduce(self, topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
        memory = topology.node_memory
        rows = memory.pack_values(send)

        def fill(total: np.ndarray) -> None:
            combine_rows(combine, rows, total)

        if len(topology.nodes) > 1:
            topology.lock.meet(Payload(receive.dtype, len(receive), combine, fill))
        else:
            topology.lock.meet()
            if memory.rank == 0:
                fill(memory.total(receive.dtype, len(receive)))
            topology.lock.meet()
        receive[...] = memory.total(receive.dtype, len(receive))

    def meeting(self, topology: Topology, combine: np.ufunc, dtype: np.dtype, length: int) -> Meeting | None:
        memory = topology.node_memory
        if len(topology.nodes) == 1 or length * dtype.itemsize > self.piece_bytes(topology):
            return None
        generations = [memory.slots(dtype, length, generation) for generation in (0, 1)]
        result = memory.total(dtype, length)

        def fill(total: np.ndarray) -> None:
            combine_rows(combine, generations[memory.generation ^ 1][1], total)

        def take(out: np.ndarray) -> None:
            out[...] = result

        agree = topology.lock.combining(Payload(dtype, length, combine, fill))
        meet = partial(topology.lock.ignoring_float_errors, agree)
        return Meeting([own for own, _ in generations], meet, [take, take])


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
        # others by a meeting: the lock must know, see `CollectiveLock.is_shared_memory_only`.
        topology.lock.is_shared_memory_only = topology.shares_all
        if topology.lock.is_shared_memory_only:
            _in_memory.reduce(topology, combine, send, receive)
        elif send.nbytes * topology.size <= _GATHERED_BYTES:
            everything = np.empty((topology.size, len(send)), send.dtype)
            # As bytes: MPI has no datatype for float16, and mpi4py refuses bfloat16.
            topology.world.Allgather(send.view(np.uint8), everything.view(np.uint8))
            combine_rows(combine, list(everything), receive)
        else:
            combine_by_slices(topology.world, [send], [1] * topology.size, receive, partial(combine_rows, combine))
