"""The shared memory of a node, through which its ranks exchange data and synchronize."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.memory.shared import share
from mpistrat.process.cache import Cache
from mpistrat.record.layout import Kind
from mpistrat.record.ring import timed

_HEADER = 8  # bytes of a rank's word
_MOST_VIEWS = 1024
_LINE = 64  # bytes of a cache line

_Key = tuple[int, np.dtype, int, int]  # generation, dtype, length, place


class NodeMemory:
    """Two slots for every rank of a node, used alternately, so that one barrier per piece is enough.

    A rank writes to its slot, waits at a barrier, and reads the slots of the other ranks. It may then write to its
    other slot at once: ranks finish reading that slot before they enter the barrier.

    ``results`` are areas for the combination of all slots, two with several nodes, and ``result`` is the first: written
    after one barrier, read after the next, as the number ``verdict`` is. ``generation`` is the slot, 0 or 1, that each
    rank may write to now. ``meetings`` counts the barriers that this rank entered; an error before one leaves it alone.
    """

    def __init__(self, node: Any, slot_bytes: int, between_nodes: bool, same_place_bytes: int):
        self.rank: int = node.rank
        self.size: int = node.size
        self.slot_bytes = slot_bytes
        self._same_place_bytes = same_place_bytes
        results = (2 if between_nodes else 1) * slot_bytes
        headers = _HEADER * self.size
        shared = share(node, 2 * self.slot_bytes, results + 2 * headers + _HEADER)
        slots = shared.stretches[:, : 2 * self.slot_bytes].reshape(self.size, 2, self.slot_bytes)
        self._slots = slots[:, 0], slots[:, 1]
        self.results = tuple(shared.common[:results].reshape(-1, self.slot_bytes))
        self.result = self.results[0]
        said = memoryview(shared.common.data)[results:]
        self._said = said[:headers].cast("q"), said[headers : 2 * headers].cast("q")
        self.verdict = said[2 * headers : 2 * headers + _HEADER].cast("q")
        self._views = Cache[_Key, tuple[np.ndarray, list[np.ndarray]]](_MOST_VIEWS)
        self._totals = Cache[tuple[np.dtype, int], np.ndarray](_MOST_VIEWS)
        self.generation = 0
        self.meetings = 0
        self._barrier = node.Barrier

    def slots(self, dtype: np.dtype, count: int, generation: int | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return this rank's slot and the slots of all ranks, as arrays of ``count`` elements."""
        if generation is None:
            generation = self.generation
        key = (generation, dtype, count, 0)
        return self._views.get(key) or self._views_at(key, 0)

    def _views_at(self, key: _Key, start: int) -> tuple[np.ndarray, list[np.ndarray]]:
        generation, dtype, count, _ = key
        rows = [row[start : start + count * dtype.itemsize].view(dtype) for row in self._slots[generation]]
        return self._views.keep(key, (rows[self.rank], rows))

    def total(self, dtype: np.dtype, count: int) -> np.ndarray:
        """Return the beginning of `result` as an array of ``count`` elements."""
        found = self._totals.get((dtype, count))
        if found is None:
            found = self._totals.keep((dtype, count), self.result[: count * dtype.itemsize].view(dtype))
        return found

    def lay_down(self, values: np.ndarray) -> list[np.ndarray]:
        """Write to this rank's slot. Return the slots of all ranks, to be read after the next barrier.

        Large values rotate through a slot: data that is dirty in another core's cache is several times slower to read.
        """
        place = stride = 0
        if values.nbytes > self._same_place_bytes:
            stride = -(-values.nbytes // _LINE) * _LINE
            place = (self.meetings >> 1) % max(1, self.slot_bytes // stride)
        key = (self.generation, values.dtype, len(values), place)
        found = self._views.get(key)
        if found is None:
            found = self._views_at(key, place * stride)
        _copy(found[0], values)
        return found[1]

    def meet(self) -> None:
        """Wait for all ranks of the node. Their slots may be read afterwards."""
        self.generation ^= 1
        self.meetings += 1
        self._barrier()

    def meet_saying(self, word: int) -> bool:
        """Wait as `meet` does, exchange one number, and return whether all ranks gave the same number.

        Signal handlers run where a function begins and after a call into C: before the first line or after the barrier.
        """
        said = self._said[self.generation]
        said[self.rank] = word
        self.generation ^= 1
        self.meetings += 1
        self._barrier()
        return said.tolist().count(word) == self.size

    def agreed(self) -> bool:
        """Return whether all ranks gave the same number in the last `meet_saying`."""
        return len(set(self._said[self.generation ^ 1].tolist())) == 1


def _copy_to(slot: np.ndarray, values: np.ndarray) -> None:
    slot[...] = values


_copy = timed(Kind.REDUCE_PACK, _copy_to)
