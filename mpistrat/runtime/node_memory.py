"""Where the ranks of a node meet, and lay down what they want to add up."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.runtime.shared_memory import share

_HEADER = 8  # bytes that a rank says what it does in
_SLOT_BYTES = 512 << 10  # a piece that stays in the cache of a core
_WIRE_SLOT_BYTES = 4 << 20  # a piece that keeps the wire between nodes busy
_MOST_BYTES = 64 << 20  # of a node
_FEWEST_SLOT_BYTES = 64 << 10


class NodeMemory:
    """Two slots for every rank of a node, used in turn, so that one barrier a piece is enough.

    A rank writes to its slot, all meet, each reads the others' slots. It may then write to its other slot at
    once: who still reads that one has not come to this barrier.

    Attributes
    ----------
    rank, size : int
        This rank among those of the node, and how many they are.
    slot_bytes : int
    result : numpy.ndarray of uint8, shape (slot_bytes,)
        A place for what is made of all slots. Written after one barrier, read after the next.
    verdict : memoryview of int
        A place for one number, used in the same way.
    """

    def __init__(self, node: Any, between_nodes: bool):
        self.rank: int = node.rank
        self.size: int = node.size
        wanted = _WIRE_SLOT_BYTES if between_nodes else _SLOT_BYTES
        room = _MOST_BYTES // (2 * self.size + 1)
        self.slot_bytes = max(_FEWEST_SLOT_BYTES, min(wanted, 1 << (room.bit_length() - 1)))
        headers = _HEADER * self.size
        shared = share(node, 2 * self.slot_bytes, self.slot_bytes + 2 * headers + _HEADER)
        slots = shared.stretches[:, : 2 * self.slot_bytes].reshape(self.size, 2, self.slot_bytes)
        self._slots = slots[:, 0], slots[:, 1]
        self.result = shared.common[: self.slot_bytes]
        said = memoryview(shared.common.data)[self.slot_bytes :]
        self._said = said[:headers].cast("q"), said[headers : 2 * headers].cast("q")
        self.verdict = said[2 * headers : 2 * headers + _HEADER].cast("q")
        self._views: dict[tuple[int, np.dtype, int], tuple[np.ndarray, list[np.ndarray]]] = {}
        self._generation = 0
        self._barrier = node.Barrier

    def slots(self, dtype: np.dtype, count: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """This rank's slot to write to, and all ranks', as arrays of ``count`` elements."""
        key = (self._generation, dtype, count)
        found = self._views.get(key)
        if found is None:
            if len(self._views) > 1024:
                self._views.clear()
            rows = [row[: count * dtype.itemsize].view(dtype) for row in self._slots[self._generation]]
            found = self._views[key] = rows[self.rank], rows
        return found

    def lay_down(self, values: np.ndarray) -> list[np.ndarray]:
        """Write to this rank's slot. Returns all ranks' slots, to be read once they have met."""
        found = self._views.get((self._generation, values.dtype, len(values)))
        own, rows = found or self.slots(values.dtype, len(values))
        own[...] = values
        return rows

    def meet(self) -> None:
        """Wait for all ranks of the node: what they wrote may be read now."""
        self._generation ^= 1
        self._barrier()

    def meet_saying(self, word: int) -> bytes:
        """As `meet`, and tell each other one number: those of all ranks, 8 bytes each."""
        said = self._said[self._generation]
        said[self.rank] = word
        self._generation ^= 1
        self._barrier()
        return said.tobytes()
