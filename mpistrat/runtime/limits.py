"""The sizes at which collectives change their algorithm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The sizes at which collectives change their algorithm, equal on all ranks. The defaults were measured."""

    # the slot of a rank in the memory of its node, with one node. 0: the ranks of a node do not share memory.
    slot_bytes: int = 3 << 20
    # the same with several nodes: large enough to keep the network between them busy
    slot_bytes_between_nodes: int = 4 << 20
    least_slot_bytes: int = 64 << 10  # the smallest slot to try where memory is scarce
    # up to this size a rank always writes to the same place of its slot, which stays in the cache
    same_place_bytes: int = 1 << 20
    # from this size on an array is reduced in its own message: copying it costs more than a message
    alone_bytes: int = 64 << 10
    # the same for broadcasts: MPI libraries that copy directly between processes are then as fast as slots
    broadcast_alone_bytes: int = 32 << 10
    # a message between leaders up to this size takes about as long as an empty message
    with_agreement_bytes: int = 8 << 10
    chunk_bytes: int = 2 << 20  # the largest message that is combined by MPI
    # part of a message on the ring between nodes. Up to 64 KiB, Open MPI's TCP sends eagerly.
    segment_bytes: int = 60 << 10
    exact_ring_bytes: int = 64 << 10  # from this size on exact sums are exchanged on a ring
    # the largest message that is moved without combining; below 2^31, the limit of older MPI libraries
    message_bytes: int = 1 << 30
    # the largest result that one MPI call gathers: its displacements must be below 2^31
    gathered_bytes: int = (1 << 31) - 1

    # a checkpoint up to this size is written by the chief alone: the others would take longer to open the file
    save_alone_bytes: int = 32 << 20

    def slots(self, between_nodes: bool) -> list[int]:
        """Return the slot sizes to try, largest first, in bytes. Equal on all nodes."""
        size = self.slot_bytes_between_nodes if between_nodes else self.slot_bytes
        if not size:
            return []
        sizes = [size]
        while size >= 4 * self.least_slot_bytes:
            size //= 4
            sizes.append(size)
        return sizes
