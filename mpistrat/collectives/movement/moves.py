"""The moves of arrays on the host: broadcast, all-gather, gather, scatter and all-to-all."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.collectives import structures
from mpistrat.collectives.reduce_scatter import rows_of_ranks
from mpistrat.collectives.reduction import cut, read_piece, write_piece
from mpistrat.process import mpi
from mpistrat.runtime.agreement.agreement import Payload
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Limits, Topology


def broadcast(topology: Topology, values: Sequence[np.ndarray], *details: Hashable, root: int = 0) -> list[np.ndarray]:
    """Return copies of the arrays of rank ``root``. On other ranks ``values`` give the dtypes and shapes.

    The ranks compare ``details`` too. Raise TypeError if an array holds Python objects.
    """
    with structures.refusals("broadcast", topology):
        for value in values:
            if value.dtype.hasobject:
                raise TypeError(f"arrays of Python objects ({value.dtype}) cannot be broadcast")
    if topology.rank == root:
        out = [np.array(value, order="C") for value in values]
    else:
        out = [np.empty(value.shape, value.dtype) for value in values]
    description = operation("broadcast", root, *details, *[(array.dtype, array.shape) for array in out])
    nbytes = sum([array.nbytes for array in out])
    if topology.size == 1 or not nbytes:
        with topology.lock.collective(description):
            return out
    data = [as_bytes(array) for array in out]
    if topology.memory is None:
        with topology.lock.collective(description):
            _broadcast_by_mpi(topology, data, root)
    elif len(topology.nodes) == 1:
        alone = topology.limits.broadcast_alone_bytes
        small = [array for array in data if len(array) < alone]
        large = [array for array in data if len(array) >= alone]
        with topology.lock.collective(description, synchronizes=any(map(len, small))):
            # A rank that is interrupted in MPI_Bcast cannot tell the others by a meeting, as it can in the slots.
            topology.lock.is_shared_memory_only = not large
            _broadcast_through_slots(topology, small, root)
            _broadcast_by_mpi(topology, large, root)
    elif nbytes <= topology.limits.with_agreement_bytes:
        with topology.lock.collective(description, synchronizes=True):
            _broadcast_with_agreement(topology, data, nbytes, root)
    else:
        with topology.lock.collective(description):
            _broadcast_on_two_tiers(topology, data, root)
    return out


def _broadcast_by_mpi(topology: Topology, data: Sequence[np.ndarray], root: int) -> None:
    """Broadcast bytes by ``MPI_Bcast`` (MPI 4.1 section 6.4)."""
    step = topology.limits.message_bytes
    for array in data:
        for start in range(0, len(array), step):
            topology.world.Bcast(array[start : start + step], root)


def _broadcast_through_slots(topology: Topology, data: Sequence[np.ndarray], root: int) -> None:
    memory = topology.node_memory
    for piece in cut(data, memory.slot_bytes):
        own_slot, slots = memory.slots(_BYTE, memory.slot_bytes)
        if topology.rank == root:
            write_piece(piece, own_slot)
        topology.lock.meet()
        if topology.rank != root:
            read_piece(piece, slots[root])


def _broadcast_with_agreement(topology: Topology, data: Sequence[np.ndarray], nbytes: int, root: int) -> None:
    """Broadcast few bytes in the message by which the leaders of nodes exchange checksums."""
    memory = topology.node_memory
    root_node, root_slot = topology.place_of(root)
    own_slot, slots = memory.slots(_BYTE, memory.slot_bytes)
    (piece,) = cut(data, nbytes)
    if topology.rank == root:
        write_piece(piece, own_slot)

    def fill(message: np.ndarray) -> None:
        message[...] = slots[root_slot][:nbytes] if topology.leaders.rank == root_node else 0

    topology.lock.meet(Payload(_BYTE, nbytes, np.bitwise_or, fill))
    if topology.rank != root:
        read_piece(piece, memory.result)


def _broadcast_on_two_tiers(topology: Topology, data: Sequence[np.ndarray], root: int) -> None:
    """Broadcast bytes between leaders, and inside each node through one slot, which the root or the leader fills.

    The leader of the root's node sends a piece while the other ranks of the node read it.
    """
    memory, leaders = topology.node_memory, topology.leaders
    root_node, root_slot = topology.place_of(root)
    on_root_node = topology.rank in topology.nodes[root_node]
    source = root_slot if on_root_node else 0
    for piece in cut(data, memory.slot_bytes):
        slot = memory.slots(_BYTE, memory.slot_bytes)[1][source]
        last, _ = piece[-1]
        message = slot[: last.stop]
        if topology.rank == root:
            write_piece(piece, slot)
        elif not on_root_node and leaders is not None:
            leaders.Bcast(message, root_node)
        topology.lock.meet()
        if on_root_node and leaders is not None:
            leaders.Bcast(message, root_node)
        if topology.rank != root:
            read_piece(piece, slot)


# --- messages from any rank to any other, as one part of a collective -----------


_TAG = 3  # in the communicator in which one collective runs at a time


def exchange(topology: Topology, sends: Sequence[np.ndarray | None], receives: Sequence[np.ndarray | None]) -> None:
    """Send ``sends[rank]`` to each rank and receive ``receives[rank]``, bytes of lengths that fit; None is not sent."""
    comm, step, rank = topology.world, topology.limits.message_bytes, topology.rank
    requests = []
    for other, data in enumerate(receives):
        if data is not None and other != rank:
            requests += [comm.Irecv(piece, other, _TAG) for piece in cut_into_messages(data, step)]
    for other, data in enumerate(sends):
        if data is not None and other != rank:
            requests += [comm.Isend(piece, other, _TAG) for piece in cut_into_messages(data, step)]
    outgoing, incoming = sends[rank], receives[rank]
    if outgoing is not None and incoming is not None:
        incoming[...] = outgoing
    mpi.start().Request.Waitall(requests)


def cut_into_messages(data: np.ndarray, step: int) -> list[np.ndarray]:
    """Return the parts of an array of bytes that fit into a message; one of no bytes if it is empty."""
    return [data[start : start + step] for start in range(0, max(len(data), 1), step)]


# --- gather ---------------------------------------------------------------------


_LENGTH_BYTES = 8
_SMALL_BYTES = 32 << 10  # of a rank; above it an MPI library is as fast as the slots
_CELL_BYTES = 256  # of a rank in the message with which the nodes agree
_BYTE, _LENGTH = np.dtype(np.uint8), np.dtype(np.int64)


class Gathered(NamedTuple):
    """The result of an all-gather, and the place of each rank's rows in it."""

    array: np.ndarray  # the rows of all ranks
    # the byte at which the rows of each rank begin, and the byte at which the last rank's rows end
    starts: list[int]
    parts: list[np.ndarray]  # the bytes of each rank

    @classmethod
    def like(cls, rows: np.ndarray, lengths: Sequence[int]) -> Gathered:
        """Allocate a result for ``lengths[rank]`` rows of each rank, of the shape and dtype of ``rows``."""
        array = np.empty((sum(lengths), *rows.shape[1:]), rows.dtype)
        row_bytes = math.prod(rows.shape[1:]) * rows.itemsize
        starts = [0, *itertools.accumulate([length * row_bytes for length in lengths])]
        data = as_bytes(array)
        return cls(array, starts, [data[first:last] for first, last in itertools.pairwise(starts)])


def all_gather(topology: Topology, value: np.ndarray, axis: int, timeout_seconds: float | None = None) -> np.ndarray:
    """Concatenate the replicas' arrays, whose lengths may differ along this axis, in replica order.

    Raise ValueError if the value is a scalar, does not have the axis, or dtype or other axes differ between ranks, and
    TypeError if it holds Python objects.
    """
    with structures.refusals("all_gather", topology, timeout_seconds):
        axis = checked_axis(value, axis)
    rows = np.ascontiguousarray(np.moveaxis(value, axis, 0) if axis else value)
    description = operation("all_gather", axis, value.ndim, (value.dtype, rows.shape[1:]))
    with topology.lock.collective(description, topology.memory is not None, timeout_seconds):
        if topology.size == 1:
            return value.copy(order="C")
        if topology.memory is None:
            total = _by_mpi(topology, rows, lengths_by_mpi(topology, rows))
        elif len(topology.nodes) == 1:
            total = _on_one_node(topology, rows)
        else:
            total = _on_two_tiers(topology, rows)
    return np.ascontiguousarray(np.moveaxis(total, 0, axis)) if axis else total


def checked_axis(value: Any, axis: int) -> int:
    """Return the axis as a number that is not negative. Raise as `all_gather` for what one rank can see."""
    if value.ndim == 0:
        raise ValueError("a scalar has no axis to gather along: give it one, for example value[None]")
    if not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis must be an int, not {axis!r}")
    if not -value.ndim <= axis < value.ndim:
        raise ValueError(f"axis {axis} is out of range for a value of shape {value.shape}")
    if value.dtype.hasobject:
        raise TypeError(f"arrays of Python objects ({value.dtype}) cannot be gathered")
    return int(axis) % value.ndim


def _by_mpi(topology: Topology, rows: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Gather rows as bytes by ``MPI_Allgather`` or ``MPI_Allgatherv`` (MPI 4.1 section 6.7)."""
    gathered = Gathered.like(rows, lengths)
    if len(set(lengths)) == 1 and gathered.starts[-1] <= topology.limits.gathered_bytes:
        topology.world.Allgather(as_bytes(rows), as_bytes(gathered.array))
        return gathered.array
    gathered.parts[topology.rank][...] = as_bytes(rows)
    _gather_bytes(topology.world, topology.limits, gathered, range(topology.size))
    return gathered.array


def _on_one_node(topology: Topology, rows: np.ndarray) -> np.ndarray:
    """Gather the rows of one node: small arrays through the slots with the agreement, larger ones by MPI."""
    memory = topology.node_memory
    room = min(_SMALL_BYTES, memory.slot_bytes - _LENGTH_BYTES)
    own_length, lengths = memory.slots(_LENGTH, 1)
    own_slot, slots = memory.slots(_BYTE, _LENGTH_BYTES + room)
    own_length[0] = len(rows)
    if rows.nbytes <= room:
        own_slot[_LENGTH_BYTES : _LENGTH_BYTES + rows.nbytes] = as_bytes(rows)
    topology.lock.is_shared_memory_only = False  # until the number of rows is known
    topology.lock.meet()
    counts = [int(length[0]) for length in lengths]
    row_bytes = math.prod(rows.shape[1:]) * rows.itemsize
    if max(counts) * row_bytes > room:
        return _by_mpi(topology, rows, counts)
    topology.lock.is_shared_memory_only = True
    array = np.empty((sum(counts), *rows.shape[1:]), rows.dtype)
    ends = [_LENGTH_BYTES + count * row_bytes for count in counts]
    parts = [slot[_LENGTH_BYTES:end] for slot, end in zip(slots, ends, strict=True)]
    np.concatenate(parts, out=as_bytes(array))
    return array


def _on_two_tiers(topology: Topology, rows: np.ndarray) -> np.ndarray:
    """Gather rows along each rail, then inside the node, so that a node receives the others' rows once, the minimum.

    Small arrays travel with the agreement. Nodes of different numbers of ranks gather by MPI over all.
    """
    memory = topology.node_memory
    data = as_bytes(rows)
    room = topology.limits.with_agreement_bytes // topology.size
    cell = min(room, _CELL_BYTES) // _LENGTH_BYTES * _LENGTH_BYTES
    if not cell:
        topology.lock.meet()
        gathered = Gathered.like(rows, lengths_by_mpi(topology, rows))
    else:
        cells = _meet_with_cells(topology, rows, cell)
        gathered = Gathered.like(rows, [int(length) for length in cells.view(np.int64)[:, 0]])
        if max(map(len, gathered.parts)) <= cell - _LENGTH_BYTES:
            for part, row in zip(gathered.parts, cells, strict=True):
                part[...] = row[_LENGTH_BYTES : _LENGTH_BYTES + len(part)]
            return gathered.array
    gathered.parts[topology.rank][...] = data
    if len(set(topology.ranks_per_node)) > 1:
        _gather_bytes(topology.world, topology.limits, gathered, range(topology.size))
        return gathered.array
    rails = [sorted(rail) for rail in zip(*topology.nodes, strict=True)]
    _gather_bytes(topology.rail, topology.limits, gathered, rails[memory.rank])
    if memory.size > 1:
        _exchange(topology, [[gathered.parts[rank] for rank in rail] for rail in rails])
    return gathered.array


def _meet_with_cells(topology: Topology, rows: np.ndarray, cell: int) -> np.ndarray:
    """Exchange each rank's number of rows and first bytes with the agreement, as bytes of the shape (ranks, cell)."""
    memory = topology.node_memory
    own_length, _ = memory.slots(_LENGTH, 1)
    own_slot, slots = memory.slots(_BYTE, cell)
    first = as_bytes(rows)[: cell - _LENGTH_BYTES]
    own_length[0] = len(rows)
    own_slot[_LENGTH_BYTES : _LENGTH_BYTES + len(first)] = first

    def fill(message: np.ndarray) -> None:
        message[...] = 0
        cells = message.reshape(topology.size, cell)
        for rank, slot in zip(topology.nodes[topology.leaders.rank], slots, strict=True):
            cells[rank] = slot

    topology.lock.meet(Payload(_BYTE, topology.size * cell, np.bitwise_or, fill))
    return memory.result[: topology.size * cell].reshape(topology.size, cell)


def _exchange(topology: Topology, by_rank: Sequence[Sequence[np.ndarray]]) -> None:
    """Copy the parts ``by_rank[i]`` of local rank ``i`` to all ranks of its node, through the slots."""
    memory = topology.node_memory
    streams = [cut(parts, memory.slot_bytes) for parts in by_rank]
    for pieces in itertools.zip_longest(*streams, fillvalue=()):
        own_slot, slots = memory.slots(_BYTE, memory.slot_bytes)
        write_piece(pieces[memory.rank], own_slot)
        topology.lock.meet()
        for rank, (piece, slot) in enumerate(zip(pieces, slots, strict=True)):
            if rank != memory.rank:
                read_piece(piece, slot)


def all_gather_parts(
    topology: Topology, parts: Sequence[Sequence[np.ndarray]], form: Hashable, timeout_seconds: float | None
) -> None:
    """Copy the bytes that each rank has in the flat arrays ``parts[rank]`` of uint8 into these arrays of all ranks.

    Their lengths are the same on all ranks, which compare ``form``. No rank needs more than a message beside them.
    """
    lengths = tuple(sum(map(len, arrays)) for arrays in parts)
    one_node = topology.shares_all
    description = operation("all_gather of parts", form, lengths)
    with topology.lock.collective(description, one_node and any(lengths), timeout_seconds):
        if one_node:
            _exchange(topology, parts)
        elif topology.memory is None or len(set(topology.ranks_per_node)) > 1:
            _exchange_by_mpi(topology.world, topology.limits, parts)
        else:
            rails = [sorted(rail) for rail in zip(*topology.nodes, strict=True)]
            on_rail = [parts[rank] for rank in rails[topology.memory.rank]]
            _exchange_by_mpi(topology.rail, topology.limits, on_rail)
            _exchange(topology, [[*itertools.chain(*(parts[rank] for rank in rail))] for rail in rails])


def _exchange_by_mpi(comm: Any, limits: Limits, by_rank: Sequence[Sequence[np.ndarray]]) -> None:
    """Copy the parts ``by_rank[i]`` of rank ``i`` to all ranks, as `_exchange` through messages."""
    streams = [cut(parts, limits.chunk_bytes) for parts in by_rank]
    for pieces in itertools.zip_longest(*streams, fillvalue=()):
        counts = [sum(len(part) for _, part in piece) for piece in pieces]
        ends = [*itertools.accumulate(counts)]
        buffer = np.empty(ends[-1], np.uint8)
        of_ranks = [buffer[end - count : end] for end, count in zip(ends, counts, strict=True)]
        write_piece(pieces[comm.rank], of_ranks[comm.rank])
        comm.Allgatherv(mpi.start().IN_PLACE, [buffer, counts])
        for rank, piece in enumerate(pieces):
            if rank != comm.rank:
                read_piece(piece, of_ranks[rank])


def lengths_by_mpi(topology: Topology, rows: Any) -> list[int]:
    lengths = np.empty(topology.size, np.int64)
    topology.world.Allgather(np.array([len(rows)], np.int64), lengths)
    return [int(length) for length in lengths]


def _gather_bytes(comm: Any, limits: Limits, gathered: Gathered, ranks: Sequence[int]) -> None:
    """Fill the parts of all ranks of ``comm``. ``ranks`` are their world ranks; this rank's own is filled already."""
    if gathered.starts[-1] <= limits.gathered_bytes:
        counts = [len(gathered.parts[rank]) for rank in ranks]
        starts = [gathered.starts[rank] for rank in ranks]
        comm.Allgatherv(mpi.start().IN_PLACE, [as_bytes(gathered.array), (counts, starts)])
        return
    # Older MPI libraries cannot count beyond 2^31: send each rank's part in pieces.
    for root, rank in enumerate(ranks):
        part = gathered.parts[rank]
        for start in range(0, len(part), limits.message_bytes):
            comm.Bcast(part[start : start + limits.message_bytes], root)


def gather(
    topology: Topology, value: np.ndarray, axis: int, root: int, timeout_seconds: float | None = None
) -> np.ndarray | None:
    """Do as `all_gather`, in the order of ranks, for rank ``root`` alone. Return None on other ranks."""
    with structures.refusals("gather", topology, timeout_seconds):
        axis = checked_axis(value, axis)
    rows = np.ascontiguousarray(np.moveaxis(value, axis, 0))
    description = operation("gather", root, axis, value.ndim, (value.dtype, rows.shape[1:]))
    with topology.lock.collective(description, timeout_seconds=timeout_seconds):
        if topology.size == 1:
            return value.copy(order="C")
        lengths = lengths_by_mpi(topology, rows)
        sends: list[np.ndarray | None] = [None] * topology.size
        sends[root] = as_bytes(rows)
        if topology.rank != root:
            exchange(topology, sends, [None] * topology.size)
            return None
        gathered = Gathered.like(rows, lengths)
        exchange(topology, sends, gathered.parts)
    return np.ascontiguousarray(np.moveaxis(gathered.array, 0, axis))


def gather_object(topology: Topology, value: Any, root: int | None) -> list[Any] | None:
    """Return every rank's (pickled) object, in the order of ranks, on all ranks or on ``root`` and None on others."""
    if root is None:
        return topology.all_gather_object(value)
    description = operation("gather_object", root)
    if topology.size == 1:
        with topology.lock.collective(description):
            return [value]
    message = topology.pickled("gather_object", value)
    with topology.lock.collective(description):
        pickled = topology.world.gather(message, root)
    return None if pickled is None else [mpi.start().pickle.loads(data) for data in pickled]


# --- scatter and all-to-all -----------------------------------------------------


class Scattered(NamedTuple):
    """The result of a scatter on one rank: the arrays of each of its replicas, and the note of rank ``root``."""

    parts: list[list[np.ndarray]]
    note: Any


def scatter(
    topology: Topology, values: Sequence[np.ndarray], axis: int, root: int, note: Any, blocks: Sequence[range]
) -> Scattered:
    """Cut the arrays of rank ``root`` along an axis, as evenly as possible, and return each replica's part of each.

    Rank ``rank`` plays the replicas ``blocks[rank]``. Other ranks' ``values`` and ``note``, which is pickled, are not
    used. Raise ValueError for a scalar or a missing axis, then `MismatchError` on other ranks, and TypeError if an
    array holds Python objects.
    """
    is_root, own = topology.rank == root, blocks[topology.rank]
    with structures.refusals("scatter", topology):
        axis = operator.index(axis)
        if is_root and any(value.ndim == 0 for value in values):
            raise ValueError(
                "scatter cuts arrays, and a scalar has no axis to cut along. A list is a structure of its items: "
                "to divide the items of a list, scatter numpy.array(the list)"
            )
        axes = [checked_axis(value, axis) for value in values] if is_root else []
    described = [(value.dtype, value.shape, along) for value, along in zip(values, axes, strict=False)]
    noted = topology.pickled("scatter", note) if is_root and topology.size > 1 else None
    with topology.lock.collective(operation("scatter", root, axis)):
        if topology.size == 1:
            arrays = [value.copy(order="C") for value in values]
        else:
            described, noted = topology.world.bcast((described, noted), root)
            arrays = [
                _scattered(topology, dtype, shape, along, values[i] if is_root else None, root, blocks)
                for i, (dtype, shape, along) in enumerate(described)
            ]
            note = mpi.start().pickle.loads(noted)
    of_arrays = []
    for array, (_, shape, along) in zip(arrays, described, strict=True):
        ends = _ends_of_replicas(shape[along], blocks)[own.start : own.stop]
        # One replica gets the array itself: variables take a view for a part of a buffer that is reduced in place.
        of_arrays.append(np.split(array, np.subtract(ends[1:], ends[0]), along) if len(own) > 1 else [array])
    return Scattered([[parts[i] for parts in of_arrays] for i in range(len(own))], note)


def _ends_of_replicas(rows: int, blocks: Sequence[range]) -> list[int]:
    """Return the row at which each replica's part begins, and the number of rows."""
    size = max(block.stop for block in blocks)
    return [0, *itertools.accumulate(rows_of_ranks(np.broadcast_to(0, (rows,)), size))]


def _scattered(
    topology: Topology,
    dtype: np.dtype,
    shape: tuple[int, ...],
    axis: int,
    value: np.ndarray | None,
    root: int,
    blocks: Sequence[range],
) -> np.ndarray:
    rest, ends = (*shape[:axis], *shape[axis + 1 :]), _ends_of_replicas(shape[axis], blocks)
    own = blocks[topology.rank]
    result = np.empty((ends[own.stop] - ends[own.start], *rest), dtype)
    receives: list[np.ndarray | None] = [None] * topology.size
    receives[root] = as_bytes(result)
    sends: list[np.ndarray | None] = [None] * topology.size
    if value is not None:
        rows = np.ascontiguousarray(np.moveaxis(value, axis, 0))
        sends = [as_bytes(rows[ends[block.start] : ends[block.stop]]) for block in blocks]
    exchange(topology, sends, receives)
    return np.ascontiguousarray(np.moveaxis(result, 0, axis))


def all_to_all(
    topology: Topology, value: np.ndarray, splits: Sequence[int] | None = None
) -> tuple[np.ndarray, list[int]]:
    """Send ``splits[rank]`` consecutive rows to each rank, by default equally many. Return the rows and their counts.

    Raise ValueError if the splits do not make the rows, and on every rank if dtypes or row shapes differ. Raise
    TypeError if the value holds Python objects.
    """
    with structures.refusals("all_to_all", topology):
        lengths = _splits_of(topology, value, splits)
    rows = np.ascontiguousarray(value)
    ends = [0, *itertools.accumulate(lengths)]
    sends = [as_bytes(rows[first:last]) for first, last in itertools.pairwise(ends)]
    with topology.lock.collective(operation("all_to_all", value.ndim, (value.dtype, value.shape[1:]))):
        if topology.size == 1:
            return rows.copy(), lengths
        announced = np.empty(topology.size, np.int64)
        topology.world.Alltoall(np.array(lengths, np.int64), announced)
        received = [int(count) for count in announced]
        gathered = Gathered.like(rows, received)
        exchange(topology, sends, gathered.parts)
    return gathered.array, received


def _splits_of(topology: Topology, value: np.ndarray, splits: Sequence[int] | None) -> list[int]:
    if value.dtype.hasobject:
        raise TypeError(f"arrays of Python objects ({value.dtype}) cannot be sent")
    if value.ndim == 0:
        raise ValueError("a scalar has no rows to send: give it an axis, for example value[None]")
    if splits is None:
        if len(value) % topology.size:
            raise ValueError(f"{len(value)} rows cannot be divided among {topology.size} ranks: give splits")
        return [len(value) // topology.size] * topology.size
    lengths = [int(length) for length in splits]
    if len(lengths) != topology.size or sum(lengths) != len(value) or min(lengths) < 0:
        raise ValueError(f"splits {lengths} do not make {len(value)} rows for {topology.size} ranks")
    return lengths
