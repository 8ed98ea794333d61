"""The broadcast: the arrays of one rank on every rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.collectives import structures
from mpistrat.collectives.packing import Piece, cut, read_piece, write_piece
from mpistrat.runtime.agreement.agreement import Payload
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Topology

_BYTE = np.dtype(np.uint8)


def broadcast(topology: Topology, values: Sequence[np.ndarray], *details: Hashable, root: int = 0) -> list[np.ndarray]:
    """Return copies of the arrays of rank ``root``. On other ranks ``values`` give the dtypes and shapes.

    The ranks compare ``details`` too. Raise TypeError if an array holds Python objects.
    """
    with structures.refusals("broadcast", topology):
        for each in values:
            if each.dtype.hasobject:
                raise TypeError(f"arrays of Python objects ({each.dtype}) cannot be broadcast")
    if topology.rank == root:
        out = [np.array(each, order="C") for each in values]
    else:
        out = [np.empty(each.shape, each.dtype) for each in values]
    what = operation("broadcast", root, *details, *[(each.dtype, each.shape) for each in out])
    nbytes = sum([each.nbytes for each in out])
    if topology.size == 1 or not nbytes:
        with topology.lock.collective(what):
            return out
    data = [as_bytes(each) for each in out]
    if topology.memory is None:
        with topology.lock.collective(what):
            _by_mpi(topology, data, root)
    elif len(topology.nodes) == 1:
        alone = topology.limits.broadcast_alone_bytes
        small = [each for each in data if len(each) < alone]
        large = [each for each in data if len(each) >= alone]
        with topology.lock.collective(what, synchronizes=any(map(len, small))):
            # A rank that is interrupted in MPI_Bcast cannot tell the others by a meeting, as it can in the slots.
            topology.lock.is_shared_memory_only = not large
            _through_slots(topology, small, root)
            _by_mpi(topology, large, root)
    elif nbytes <= topology.limits.with_agreement_bytes:
        with topology.lock.collective(what, synchronizes=True):
            _with_agreement(topology, data, nbytes, root)
    else:
        with topology.lock.collective(what):
            _on_two_tiers(topology, data, root)
    return out


def _by_mpi(topology: Topology, data: Sequence[np.ndarray], root: int) -> None:
    """Broadcast bytes by ``MPI_Bcast`` (MPI 4.1 section 6.4)."""
    step = topology.limits.message_bytes
    for each in data:
        for start in range(0, len(each), step):
            topology.world.Bcast(each[start : start + step], root)


def _through_slots(topology: Topology, data: Sequence[np.ndarray], root: int) -> None:
    memory = topology.node_memory
    for piece in cut(data, memory.slot_bytes):
        own, slots = memory.slots(_BYTE, memory.slot_bytes)
        if topology.rank == root:
            write_piece(piece, own)
        topology.lock.meet()
        if topology.rank != root:
            read_piece(piece, slots[root])


def _with_agreement(topology: Topology, data: Sequence[np.ndarray], nbytes: int, root: int) -> None:
    """Broadcast few bytes in the message by which the leaders of nodes exchange checksums."""
    memory = topology.node_memory
    home, place = topology.place_of(root)
    own, slots = memory.slots(_BYTE, memory.slot_bytes)
    (piece,) = cut(data, nbytes)
    if topology.rank == root:
        write_piece(piece, own)

    def fill(message: np.ndarray) -> None:
        message[...] = slots[place][:nbytes] if topology.leaders.rank == home else 0

    topology.lock.meet(Payload(_BYTE, nbytes, np.bitwise_or, fill))
    if topology.rank != root:
        read_piece(piece, memory.result)


def _on_two_tiers(topology: Topology, data: Sequence[np.ndarray], root: int) -> None:
    """Broadcast bytes between leaders, and inside each node through one slot, which the root or the leader fills.

    The leader of the root's node sends a piece while the other ranks of the node read it.
    """
    memory, leaders = topology.node_memory, topology.leaders
    home, place = topology.place_of(root)
    at_home = topology.rank in topology.nodes[home]
    source = place if at_home else 0
    for piece in cut(data, memory.slot_bytes):
        slot = memory.slots(_BYTE, memory.slot_bytes)[1][source]
        message = slot[: _end(piece)]
        if topology.rank == root:
            write_piece(piece, slot)
        elif not at_home and leaders is not None:
            leaders.Bcast(message, home)
        topology.lock.meet()
        if at_home and leaders is not None:
            leaders.Bcast(message, home)
        if topology.rank != root:
            read_piece(piece, slot)


def _end(piece: Piece) -> int:
    where, _ = piece[-1]
    return where.stop
