"""The all-reduce on a ring in segments, which overlaps sums in memory with messages on the wire."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpistrat.memory.buffer_pool import Buffers

_AHEAD = 16  # receives posted at a time, so that the wire is busy while other segments are added
# A rank's own segments may overtake those that it passes on, so they have different tags.
_OWN, _PASSED_ON = 1, 2

_scratch = Buffers()
_left: list[_Ring] = []  # rings that ended with an error, kept since MPI may still use their arrays


def _nothing(where: slice) -> None:
    pass


class InMemory(NamedTuple):
    """The hooks for work in memory on each segment. Each is called with the segment's slice of the array."""

    # called before the segment is first read, to make this node's own sum
    gather: Callable[[slice], object] = _nothing
    # called when the segment is combined, on the rank that combined it, before other ranks get it
    finish: Callable[[slice], object] = _nothing
    spread: Callable[[slice], object] = _nothing  # called when the segment is final
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
        _left.append(ring)  # MPI may still read and write its arrays
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
        gather, finish, spread, meanwhile = self._in_memory
        if self._size == 1:
            for where in self._parts[0]:
                gather(where)
                finish(where)
                spread(where)
            return
        last, ahead = 2 * self._combined, min(_AHEAD, self._segments)
        room = max(where.stop - where.start for part in self._parts for where in part)
        scratch = _scratch.empty((ahead * room,), self._data.dtype)
        self._scratch += [scratch[i * room : (i + 1) * room] for i in range(ahead)]
        # Receives are posted ahead of the messages: MPI then writes a segment to its place at once. A message without a
        # receive is kept in a buffer of MPI, and copied from there.
        for number in range(ahead):
            self._begin(number)
            self._send_own(number)
        for number in range(last):
            where = self._where(number)
            combines = number < self._combined
            if combines:
                gather(where)  # before the wait: the node's own sum is made while the segment is on the wire
            next(meanwhile, None)
            self._receives.pop(number).Wait()
            final = number >= self._combined - self._segments
            if combines:
                mine = self._data[where]
                self._combine(mine, self._scratch[number % ahead][: len(mine)], out=mine)
                if final:
                    finish(where)  # before it is sent on: the other ranks get the finished values
            if number < last - self._segments:
                self._sends[number + self._segments] = self._send(self._data[where], tag=_PASSED_ON)
            if number + ahead < last:
                self._begin(number + ahead)
            if number + ahead < self._segments:
                self._send_own(number + ahead)
            if final:
                spread(where)
        for sent in self._sends.values():
            sent.Wait()

    def _where(self, number: int) -> slice:
        step, i = divmod(number, self._segments)
        return self._parts[(self._rank - step - 1) % self._size][i]

    def _send_own(self, number: int) -> None:
        where = self._parts[self._rank][number]
        self._in_memory.gather(where)
        self._sends[number] = self._send(self._data[where], tag=_OWN)

    def _begin(self, number: int) -> None:
        where = self._where(number)
        if number < self._combined:
            target = self._scratch[number % len(self._scratch)][: where.stop - where.start]
        else:
            # This rank sent the same elements a whole round ago. The send must end before they are overwritten.
            self._sends.pop(number - self._combined).Wait()
            target = self._data[where]
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
