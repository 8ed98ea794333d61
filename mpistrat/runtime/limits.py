"""Sizes at which collectives change their way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes, equal on all ranks of a topology, at which its collectives change their way.

    The defaults were measured. Small limits lead small arrays through the code for large ones.

    Attributes
    ----------
    slot_bytes : int
        A rank's slot in the memory of its node, where there is one node. 0: the ranks of a node share no memory.
    slot_bytes_between_nodes : int
        The same, where there are several: a piece that keeps the wire between them busy.
    least_slot_bytes : int
        The smallest slot that is tried where memory is scarce.
    same_place_bytes : int
        Up to here a rank writes to the same place of its slot each time, which stays in the cache.
    alone_bytes : int
        From here on an array is reduced in a message of its own: copying it costs more than a message.
    broadcast_alone_bytes : int
        The same for broadcasts: an MPI library, which may copy once from process to process, is as fast as slots.
    with_agreement_bytes : int
        A message between leaders up to this size takes about as long as an empty one.
    chunk_bytes : int
        The largest message that is combined by MPI.
    segment_bytes : int
        Part of a message on the ring between nodes. Up to 64 KiB Open MPI's TCP sends without asking first.
    exact_ring_bytes : int
        From here on exact sums are exchanged on a ring.
    message_bytes : int
        The largest message that is only moved; below 2^31, where older MPI libraries end.
    gathered_bytes : int
        The largest result that one call of MPI gathers: they count its places to 2^31.
    """

    slot_bytes: int = 3 << 20
    slot_bytes_between_nodes: int = 4 << 20
    least_slot_bytes: int = 64 << 10
    same_place_bytes: int = 1 << 20
    alone_bytes: int = 64 << 10
    broadcast_alone_bytes: int = 32 << 10
    with_agreement_bytes: int = 8 << 10
    chunk_bytes: int = 2 << 20
    segment_bytes: int = 60 << 10
    exact_ring_bytes: int = 64 << 10
    message_bytes: int = 1 << 30
    gathered_bytes: int = (1 << 31) - 1

    def slots(self, between_nodes: bool) -> list[int]:
        """Bytes of a slot to try: the wanted size first, then smaller ones. Equal on all nodes."""
        size = self.slot_bytes_between_nodes if between_nodes else self.slot_bytes
        if not size:
            return []
        sizes = [size]
        while size >= 4 * self.least_slot_bytes:
            size //= 4
            sizes.append(size)
        return sizes
