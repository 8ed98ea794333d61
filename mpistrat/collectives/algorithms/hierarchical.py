"""The all-reduces in the memory of nodes: with rails between them, by leaders for small messages, and in rank order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from mpistrat.collectives.algorithms.contract import WHOLE, Algorithm, Cost, Meeting, agreement_cost
from mpistrat.collectives.algorithms.tree import combine_by_slices, combine_rows
from mpistrat.collectives.segmented_ring import InMemory, segmented_ring_all_reduce
from mpistrat.runtime.agreement.agreement import PAYLOAD_BYTES, Payload
from mpistrat.runtime.topology import Topology

_BLOCK_BYTES = 128 << 10  # copied between two waits for the wire
_PIECE_BYTES = 3 << 19  # see NodeMemory.lay_down
# For fewer bytes every rank adds all values itself, which costs less than a second barrier.
_ALL_BY_EACH_BYTES = 128 << 10
# Of two ranks both add all values in any case. A step of Adam (68 KiB) by `meeting` enters 17 functions of Python; by
# `reduce` 38, and it copies the gradients once more.
_BY_BOTH_BYTES = 256 << 10


def all_reduce_on_rails(topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
    """Combine all ranks' ``send`` into ``receive``, as `Algorithm.reduce` does, in pieces of a slot's size.

    Local rank ``i`` combines slice ``i`` of its node's slots, then those of other nodes by the ring. Meanwhile it
    writes the next piece to its slot and copies the result of the one before.
    """
    pieces = _Pieces(topology, send, receive)
    _exhaust(pieces.lay(0))
    topology.lock.meet()
    for i in range(pieces.count):
        meanwhile = itertools.chain(pieces.lay(i + 1), pieces.take(i - 1))
        if pieces.combines:
            rows, total, own = pieces.to_combine(i)

            def gather(where: slice, rows: list[np.ndarray] = rows, total: np.ndarray = total) -> None:
                combine_rows(combine, [row[where] for row in rows], total[where])

            def take(where: slice, total: np.ndarray = total, own: np.ndarray = own) -> None:
                own[where] = total[where]

            hooks = InMemory(gather, spread=take, meanwhile=meanwhile)
            segmented_ring_all_reduce(topology.rail, combine, total, topology.limits.segment_bytes, hooks)
        _exhaust(meanwhile)
        topology.lock.meet()
    _exhaust(pieces.take(pieces.count - 1))


class _Pieces:
    """The places of the pieces: slots of alternating generations, and two result areas in alternation."""

    def __init__(self, topology: Topology, send: np.ndarray, receive: np.ndarray):
        self._memory = memory = topology.node_memory
        self._first = memory.generation
        self._send, self._receive = send, receive
        itemsize = max(send.itemsize, receive.itemsize)
        self.count = max(1, -(-send.nbytes * itemsize // send.itemsize // memory.slot_bytes))
        self._ends = [len(send) * i // self.count for i in range(self.count + 1)]
        self._slices = min(topology.ranks_per_node)
        self.combines = memory.rank < self._slices
        self._step = max(1, _BLOCK_BYTES // itemsize)

    def _piece(self, i: int) -> slice:
        return slice(self._ends[i], self._ends[i + 1])

    def _own(self, length: int) -> slice:
        """Return the slice of a piece that this rank combines."""
        if not self.combines:
            return slice(0, 0)
        rank, slices = self._memory.rank, self._slices
        return slice(length * rank // slices, length * (rank + 1) // slices)

    def _slots(self, i: int) -> list[np.ndarray]:
        length = self._ends[i + 1] - self._ends[i]
        return self._memory.slots(self._send.dtype, length, (self._first + i) % 2)[1]

    def _result(self, i: int) -> np.ndarray:
        nbytes = (self._ends[i + 1] - self._ends[i]) * self._receive.itemsize
        return self._memory.results[i % 2][:nbytes].view(self._receive.dtype)

    def lay(self, i: int) -> Iterator[None]:
        """Copy the parts of piece ``i`` that other ranks combine to this rank's slot, block by block."""
        if i >= self.count:
            return
        piece = self._send[self._piece(i)]
        yield from self._copy(self._slots(i)[self._memory.rank], piece)

    def take(self, i: int) -> Iterator[None]:
        """Copy the parts of the result of piece ``i`` that other ranks combined, block by block."""
        if i >= 0:
            yield from self._copy(self._receive[self._piece(i)], self._result(i))

    def _copy(self, target: np.ndarray, source: np.ndarray) -> Iterator[None]:
        own = self._own(len(source))
        for first, last in ((0, own.start), (own.stop, len(source))):
            for start in range(first, last, self._step):
                block = slice(start, min(last, start + self._step))
                target[block] = source[block]
                yield

    def to_combine(self, i: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """Return this rank's slice of piece ``i`` of each rank of the node, and the two places of its sum."""
        slots, piece = self._slots(i), self._piece(i)
        own = self._own(len(slots[0]))
        slots = [*slots]
        slots[self._memory.rank] = self._send[piece]
        return [row[own] for row in slots], self._result(i)[own], self._receive[piece][own]


def _exhaust(work: Iterator[None]) -> None:
    for _ in work:
        pass


class HierarchicalAllReduce(Algorithm):
    """The all-reduce in which each rank of a node adds a slice of all slots.

    Between nodes, slice ``i`` goes round a ring on the rail of local rank ``i``. A node sends and receives the minimum,
    ``2 (nodes - 1) / nodes`` times the bytes of the message.
    """

    name = "hierarchical"
    meets = True
    in_place = True

    def fits(self, topology: Topology) -> bool:
        return topology.memory is not None

    def cost(self, topology: Topology) -> Cost:
        """Return the time in memory or on the wire, the longer one, plus the latency of each piece's ring."""
        nodes = len(topology.nodes)
        inside = min(max(topology.ranks_per_node), 3) / 12e9
        if nodes == 1:
            return Cost(5e-7, inside)
        wire = 2 * (nodes - 1) / nodes / 9e8
        ring = 120e-6 + 2 * (nodes - 1) * 15e-6
        return Cost(agreement_cost(topology), max(inside, wire), ring, topology.node_memory.slot_bytes)

    def piece_bytes(self, topology: Topology) -> int:
        return min(_PIECE_BYTES, topology.node_memory.slot_bytes) if len(topology.nodes) == 1 else WHOLE

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
        return Meeting([own for own, _ in generations], memory.barrier_with_token, take)


def _reduce_in_memory(topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
    memory = topology.node_memory
    rows = memory.pack_values(send)
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


# --- by leaders, and in the order of ranks --------------------------------------


_ORDERED_PIECE_BYTES = 4 << 20
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
        return _in_memory.piece_bytes(topology) if topology.shares_all else _ORDERED_PIECE_BYTES

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
