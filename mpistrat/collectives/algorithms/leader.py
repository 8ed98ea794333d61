"""The all-reduce of small messages: shared memory inside the nodes, leaders between them."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from mpistrat.collectives.algorithms.contract import Algorithm, Cost, Meeting
from mpistrat.collectives.arithmetic.combine_rows import combine_rows
from mpistrat.runtime.agreement.agreement import PAYLOAD_BYTES, Payload
from mpistrat.runtime.topology import Topology


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
        rows = memory.lay_down(send)

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
