"""The hierarchical all-reduce: shared memory inside the nodes, rails between them."""

from __future__ import annotations

from functools import partial

import numpy as np

from mpistrat.collectives.algorithms.contract import WHOLE, Algorithm, Cost, Meeting, agreement_cost
from mpistrat.collectives.arithmetic.combine_rows import combine_rows
from mpistrat.collectives.rings.rails import all_reduce_on_rails
from mpistrat.runtime.topology import Topology

_PIECE_BYTES = 3 << 19  # see NodeMemory.lay_down
# For fewer bytes every rank adds all values itself, which costs less than a second barrier.
_ALL_BY_EACH_BYTES = 128 << 10
# Of two ranks both add all values in any case. A step of Adam (68 KiB) by `meeting` enters 17 functions of Python; by
# `reduce` 38, and it copies the gradients once more.
_BY_BOTH_BYTES = 256 << 10


class HierarchicalAllReduce(Algorithm):
    """The all-reduce in which each rank of a node adds a slice of all slots.

    Between nodes, slice ``i`` is combined by a ring on the rail of local rank ``i``. Then each rank copies the whole
    result. Every node sends and receives ``2 (nodes - 1) / nodes`` times the bytes of the message, for any number of
    ranks.
    """

    name = "hierarchical"
    meets = True
    in_place = True

    def fits(self, topology: Topology) -> bool:
        return topology.memory is not None

    def cost(self, topology: Topology) -> Cost:
        """Return the time in memory or on the wire, the longer one, plus the latency of each piece's ring.

        Buffers in place are one piece.
        """
        nodes = len(topology.nodes)
        inside = min(max(topology.ranks_per_node), 3) / 12e9
        if nodes == 1:
            return Cost(5e-7, inside)
        assert topology.memory is not None
        wire = 2 * (nodes - 1) / nodes / 9e8
        ring = 120e-6 + 2 * (nodes - 1) * 15e-6
        return Cost(agreement_cost(topology), max(inside, wire), ring, topology.memory.slot_bytes)

    def piece_bytes(self, topology: Topology) -> int:
        assert topology.memory is not None
        return min(_PIECE_BYTES, topology.memory.slot_bytes) if len(topology.nodes) == 1 else WHOLE

    def reduce(self, topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
        if len(topology.nodes) == 1:
            _reduce_in_memory(topology, combine, send, receive)
        else:
            all_reduce_on_rails(topology, combine, send, receive)

    def meeting(self, topology: Topology, combine: np.ufunc, dtype: np.dtype, length: int) -> Meeting | None:
        memory = topology.memory
        assert memory is not None
        most = _BY_BOTH_BYTES if memory.size == 2 else _ALL_BY_EACH_BYTES // memory.size
        if len(topology.nodes) > 1 or length * dtype.itemsize > most:
            return None
        generations = [memory.slots(dtype, length, generation) for generation in (0, 1)]
        # A ufunc is called directly, without a function of Python around it.
        add = combine if memory.size == 2 else partial(combine_rows, combine)
        take = [partial(add, *rows) if memory.size == 2 else partial(add, rows) for _, rows in generations]
        return Meeting([own for own, _ in generations], memory.meet_saying, take)


def _reduce_in_memory(topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
    memory = topology.memory
    assert memory is not None
    rows = memory.lay_down(send)
    topology.lock.meet()
    if len(rows) == 2:
        # `send` holds the same values as the slot, and is faster to read than a slot that other ranks read too.
        pair = (send, rows[1]) if memory.rank == 0 else (rows[0], send)
        combine(*pair, out=receive, dtype=receive.dtype)
        return
    if len(rows) * receive.nbytes <= _ALL_BY_EACH_BYTES:
        combine_rows(combine, rows, receive)
        return
    result = memory.total(receive.dtype, len(receive))
    part = slice(len(send) * memory.rank // memory.size, len(send) * (memory.rank + 1) // memory.size)
    combine_rows(combine, [row[part] for row in rows], result[part])
    topology.lock.meet()
    receive[...] = result
