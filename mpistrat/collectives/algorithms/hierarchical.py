"""The all-reduces in the memory of nodes: with rails between them, by leaders for small messages, and in rank order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpistrat.collectives.algorithms.contract import WHOLE, Algorithm, Cost, Meeting, agreement_cost
from mpistrat.collectives.algorithms.tree import combine_by_slices, combine_rows
from mpistrat.memory.buffer_pool import Buffers
from mpistrat.runtime.agreement.agreement import PAYLOAD_BYTES, Payload
from mpistrat.runtime.topology import Topology

_AHEAD = 16  # receives posted at a time, so that the wire is busy while other segments are added
# A rank's own segments may overtake segments that it passes on, so they have different tags.
_OWN, _PASSED_ON = 1, 2

_scratch = Buffers()
_left_rings: list[_Ring] = []  # rings that ended with an error, kept since MPI may still use their arrays


def _nothing(segment: slice) -> None:
    pass


class InMemory(NamedTuple):
    """The hooks for work in memory on each segment. Each is called with the segment's slice of the array."""

    # called before the segment is first read, to make this node's own sum
    reduce_on_node: Callable[[slice], object] = _nothing
    # called when the segment is combined, on the rank that combined it, before other ranks get it
    finish: Callable[[slice], object] = _nothing
    copy_out: Callable[[slice], object] = _nothing  # called when the segment is final
    # an iterator of other work. One item is taken before each wait; the remaining items are left.
    meanwhile: Iterator[object] = iter(())


def segmented_ring_all_reduce(
    comm: Any, combine: np.ufunc, data: np.ndarray, segment_bytes: int, in_memory: InMemory | None = None
) -> None:
    """Combine all ranks' flat ``data`` in place, by a reduce-scatter and an all-gather on a ring, in segments.

    Every rank sends the minimum, ``2 (size - 1) / size`` times the bytes (Patarasuk and Yuan 2009), and gets the same
    bits. A segment is sent on as soon as it is combined, while the next ones arrive (section 4).
    """
    ring = _Ring(comm, combine, data, segment_bytes, in_memory or InMemory())
    try:
        ring.run()
    except BaseException:
        _left_rings.append(ring)  # MPI may still read and write its arrays
        raise


class _Ring:
    """The segments of one call, numbered in the order of arrival: ``step * segments + i``.

    In the first ``size - 1`` steps a segment is combined with this rank's own and sent on, in as many more it is final.
    """

    def __init__(self, comm: Any, combine: np.ufunc, data: np.ndarray, segment_bytes: int, in_memory: InMemory):
        self._combine = combine
        self._data = data
        self._in_memory = in_memory
        self._size, self._rank = comm.size, comm.rank
        self._parts = _cut(data, comm.size, segment_bytes)
        self._segments = len(self._parts[0])
        self._combined = (comm.size - 1) * self._segments
        self._send = partial(comm.Isend, dest=(comm.rank + 1) % comm.size)
        self._receive = partial(comm.Irecv, source=(comm.rank - 1) % comm.size)
        self._receives: dict[int, Any] = {}
        self._sends: dict[int, Any] = {}  # by the number of step and segment at which each begins
        self._scratch: list[np.ndarray] = []

    def run(self) -> None:
        reduce_on_node, finish, copy_out, meanwhile = self._in_memory
        if self._size == 1:
            for segment in self._parts[0]:
                reduce_on_node(segment)
                finish(segment)
                copy_out(segment)
            return
        last, ahead = 2 * self._combined, min(_AHEAD, self._segments)
        room = max(segment.stop - segment.start for part in self._parts for segment in part)
        scratch = _scratch.empty((ahead * room,), self._data.dtype)
        self._scratch += [scratch[i * room : (i + 1) * room] for i in range(ahead)]
        # Receives are posted ahead of the messages: MPI then writes a segment to its place at once. A message without a
        # receive is kept in a buffer of MPI, and copied from there.
        for number in range(ahead):
            self._begin(number)
            self._send_own(number)
        for number in range(last):
            segment = self._segment(number)
            combines = number < self._combined
            if combines:
                reduce_on_node(segment)  # before the wait: the node's own sum is made while the segment is on the wire
            next(meanwhile, None)
            self._receives.pop(number).Wait()
            final = number >= self._combined - self._segments
            if combines:
                target = self._data[segment]
                self._combine(target, self._scratch[number % ahead][: len(target)], out=target)
                if final:
                    finish(segment)  # before it is sent on: the other ranks get the finished values
            if number < last - self._segments:
                self._sends[number + self._segments] = self._send(self._data[segment], tag=_PASSED_ON)
            if number + ahead < last:
                self._begin(number + ahead)
            if number + ahead < self._segments:
                self._send_own(number + ahead)
            if final:
                copy_out(segment)
        for request in self._sends.values():
            request.Wait()

    def _segment(self, number: int) -> slice:
        step, i = divmod(number, self._segments)
        return self._parts[(self._rank - step - 1) % self._size][i]

    def _send_own(self, number: int) -> None:
        segment = self._parts[self._rank][number]
        self._in_memory.reduce_on_node(segment)
        self._sends[number] = self._send(self._data[segment], tag=_OWN)

    def _begin(self, number: int) -> None:
        segment = self._segment(number)
        if number < self._combined:
            target = self._scratch[number % len(self._scratch)][: segment.stop - segment.start]
        else:
            # This rank sent the same elements a whole round ago. The send must end before they are overwritten.
            self._sends.pop(number - self._combined).Wait()
            target = self._data[segment]
        self._receives[number] = self._receive(target, tag=_OWN if number < self._segments else _PASSED_ON)


def _cut(data: np.ndarray, size: int, segment_bytes: int) -> list[list[slice]]:
    """Return the parts of the ranks, each cut into the same number of segments."""
    ends = [len(data) * i // size for i in range(size + 1)]
    longest = max(last - first for first, last in itertools.pairwise(ends))
    count = max(1, math.ceil(longest * data.itemsize / segment_bytes))
    parts = []
    for first, last in itertools.pairwise(ends):
        cuts = [first + (last - first) * i // count for i in range(count + 1)]
        parts.append([slice(*pair) for pair in itertools.pairwise(cuts)])
    return parts


# --- the algorithm --------------------------------------------------------------


_BLOCK_BYTES = 128 << 10  # copied between two waits for the wire
_PIECE_BYTES = 3 << 19  # see NodeMemory.pack_values
# For fewer bytes every rank adds all values itself, which costs less than a second barrier.
_ALL_BY_EACH_BYTES = 128 << 10
# Of two ranks both add all values in any case. A step of Adam (68 KiB) by `meeting` enters 17 functions of Python; by
# `reduce` 38, and it copies the gradients once more.
_BY_BOTH_BYTES = 256 << 10


def all_reduce_on_rails(topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
    """Combine all ranks' ``send`` into ``receive``, as `Algorithm.reduce` does, in pieces of a slot's size.

    Local rank ``i`` combines slice ``i`` of its node's slots, then the other nodes' sums by the ring. Meanwhile it
    writes the next piece to its slot and copies the result of the one before.
    """
    pieces = _Pieces(topology, send, receive)
    _exhaust(pieces.write_slot(0))
    topology.lock.meet()
    for i in range(pieces.count):
        meanwhile = itertools.chain(pieces.write_slot(i + 1), pieces.read_result(i - 1))
        if pieces.combines:
            rows, total, out = pieces.to_combine(i)

            def reduce_on_node(segment: slice, rows: list[np.ndarray] = rows, total: np.ndarray = total) -> None:
                combine_rows(combine, [row[segment] for row in rows], total[segment])

            def copy_out(segment: slice, total: np.ndarray = total, out: np.ndarray = out) -> None:
                out[segment] = total[segment]

            hooks = InMemory(reduce_on_node, copy_out=copy_out, meanwhile=meanwhile)
            segmented_ring_all_reduce(topology.rail, combine, total, topology.limits.segment_bytes, hooks)
        _exhaust(meanwhile)
        topology.lock.meet()
    _exhaust(pieces.read_result(pieces.count - 1))


class _Pieces:
    """The memory of the pieces: slots of alternating generations, and two alternating result areas."""

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

    def _own_slice(self, length: int) -> slice:
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

    def write_slot(self, i: int) -> Iterator[None]:
        """Copy the parts of piece ``i`` that other ranks combine to this rank's slot, block by block."""
        if i >= self.count:
            return
        piece = self._send[self._piece(i)]
        yield from self._copy(self._slots(i)[self._memory.rank], piece)

    def read_result(self, i: int) -> Iterator[None]:
        """Copy the parts of the result of piece ``i`` that other ranks combined, block by block."""
        if i >= 0:
            yield from self._copy(self._receive[self._piece(i)], self._result(i))

    def _copy(self, target: np.ndarray, source: np.ndarray) -> Iterator[None]:
        own_slice = self._own_slice(len(source))
        for first, last in ((0, own_slice.start), (own_slice.stop, len(source))):
            for start in range(first, last, self._step):
                block = slice(start, min(last, start + self._step))
                target[block] = source[block]
                yield

    def to_combine(self, i: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """Return this rank's slice of piece ``i`` of each rank of the node, and the two places of its sum."""
        slots, piece = self._slots(i), self._piece(i)
        own_slice = self._own_slice(len(slots[0]))
        slots = [*slots]
        slots[self._memory.rank] = self._send[piece]
        return [row[own_slice] for row in slots], self._result(i)[own_slice], self._receive[piece][own_slice]


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
        memory = topology.node_memory
        most = _BY_BOTH_BYTES if memory.size == 2 else _ALL_BY_EACH_BYTES // memory.size
        if len(topology.nodes) > 1 or length * dtype.itemsize > most:
            return None
        generations = [memory.slots(dtype, length, generation) for generation in (0, 1)]
        # A ufunc is called directly, without a function of Python around it.
        add = combine if memory.size == 2 else partial(combine_rows, combine)
        take = [partial(add, *rows) if memory.size == 2 else partial(add, rows) for _, rows in generations]
        return Meeting([slot for slot, _ in generations], memory.barrier_with_token, take)


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
            # The barrier before has switched to the other generation of slots.
            combine_rows(combine, generations[memory.generation ^ 1][1], total)

        def take(out: np.ndarray) -> None:
            out[...] = result

        agree = topology.lock.combining(Payload(dtype, length, combine, fill))
        meet = partial(topology.lock.ignoring_float_errors, agree)
        return Meeting([slot for slot, _ in generations], meet, [take, take])


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
            gathered = np.empty((topology.size, len(send)), send.dtype)
            # As bytes: MPI has no datatype for float16, and mpi4py refuses bfloat16.
            topology.world.Allgather(send.view(np.uint8), gathered.view(np.uint8))
            combine_rows(combine, list(gathered), receive)
        else:
            combine_by_slices(topology.world, [send], [1] * topology.size, receive, partial(combine_rows, combine))
