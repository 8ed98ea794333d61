"""The all-reduce over several nodes by a ring on each rail, overlapped with copies in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from mpistrat.collectives.arithmetic.combine_rows import combine_rows
from mpistrat.collectives.rings.segmented import InMemory, segmented_ring_all_reduce
from mpistrat.runtime.topology import Topology

_BLOCK_BYTES = 128 << 10  # copied between two waits for the wire


def all_reduce_on_rails(topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
    """Combine all ranks' ``send`` of any length into ``receive``, as `Algorithm.reduce` does.

    The array is cut into pieces of the size of a slot. While a piece is on the wire, each rank writes the next piece to
    its slot and copies the result of the one before. Local rank ``i`` combines slice ``i`` of the slots of its node,
    then that of other nodes by the ring.
    """
    memory = topology.memory
    assert memory is not None
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
        memory = topology.memory
        assert memory is not None
        self._memory = memory
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
