"""Inside the node through shared memory, between nodes by the leaders alone."""

from __future__ import annotations

import math

import numpy as np

from mpistrat.collectives.algorithm import Algorithm, agreement_cost
from mpistrat.collectives.combine_rows import combine_rows
from mpistrat.collectives.mpi_all_reduce import mpi_operation
from mpistrat.runtime import mpi
from mpistrat.runtime.agreement import PAYLOAD_BYTES, Payload
from mpistrat.runtime.device import Device
from mpistrat.runtime.topology import Topology


class LeaderAllReduce(Algorithm):
    """The leader of each node adds up what its ranks laid down; small sums travel with the agreement."""

    name = "leader"
    meets = True

    def supports(self, topology: Topology, dtype: np.dtype, device: Device) -> bool:
        return topology.memory is not None and device.kind == "cpu" and dtype.kind in "iufc"

    def cost(self, topology: Topology, nbytes: int) -> float:
        """One exchange for each doubling of the number of nodes, and one before if more than goes with that."""
        doublings = math.ceil(math.log2(len(topology.nodes)))
        exchanges = agreement_cost(topology) if nbytes > PAYLOAD_BYTES else 0.0
        exchanges += doublings * (10e-6 + nbytes / 8e8)
        return 1e-6 + max(topology.ranks_per_node) * nbytes / 12e9 + exchanges

    def piece_bytes(self, topology: Topology) -> int:
        assert topology.memory is not None
        return topology.memory.slot_bytes

    def reduce(self, topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
        memory = topology.memory
        assert memory is not None
        rows = memory.lay_down(send)
        result = memory.total(receive.dtype, len(receive))
        if receive.nbytes <= PAYLOAD_BYTES and len(topology.nodes) > 1:

            def fill(total: np.ndarray) -> None:
                combine_rows(combine, rows, total)

            topology.meet(Payload(receive.dtype, len(receive), combine, fill))
        else:
            topology.meet()
            if topology.leaders is not None:
                combine_rows(combine, rows, result)
                if topology.leaders.size > 1:
                    topology.leaders.Allreduce(
                        mpi.start().IN_PLACE, result, mpi_operation(combine, result.dtype)
                    )
            topology.meet()
        receive[...] = result
