"""The all-gather and the gather: the replicas' arrays along an axis, or their objects, on all ranks or on one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.collectives import structures
from mpistrat.collectives.movement.exchange import exchange
from mpistrat.collectives.packing import cut, read_piece, write_piece
from mpistrat.process import mpi
from mpistrat.runtime.agreement.agreement import Payload
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.limits import Limits
from mpistrat.runtime.topology import Topology

_LENGTH_BYTES = 8
_SMALL_BYTES = 32 << 10  # of a rank; above it an MPI library is as fast as the slots
_CELL_BYTES = 256  # of a rank in the message with which the nodes agree
_BYTE, _LENGTH = np.dtype(np.uint8), np.dtype(np.int64)


class Gathered(NamedTuple):
    """The result of an all-gather, and the place of each rank's rows in it."""

    array: np.ndarray  # the rows of all ranks
    # the byte at which the rows of each rank begin, and the byte at which those of the last rank end
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
    what = operation("all_gather", axis, value.ndim, (value.dtype, rows.shape[1:]))
    with topology.lock.collective(what, topology.memory is not None, timeout_seconds):
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
    whole = Gathered.like(rows, lengths)
    if len(set(lengths)) == 1 and whole.starts[-1] <= topology.limits.gathered_bytes:
        topology.world.Allgather(as_bytes(rows), as_bytes(whole.array))
        return whole.array
    whole.parts[topology.rank][...] = as_bytes(rows)
    _gather_bytes(topology.world, topology.limits, whole, range(topology.size))
    return whole.array


def _on_one_node(topology: Topology, rows: np.ndarray) -> np.ndarray:
    """Gather the rows of one node: small arrays through the slots with the agreement, larger ones by MPI."""
    memory = topology.node_memory
    room = min(_SMALL_BYTES, memory.slot_bytes - _LENGTH_BYTES)
    own_length, lengths = memory.slots(_LENGTH, 1)
    own, slots = memory.slots(_BYTE, _LENGTH_BYTES + room)
    own_length[0] = len(rows)
    if rows.nbytes <= room:
        own[_LENGTH_BYTES : _LENGTH_BYTES + rows.nbytes] = as_bytes(rows)
    topology.lock.is_shared_memory_only = False  # until the number of rows is known
    topology.lock.meet()
    counts = [int(each[0]) for each in lengths]
    row_bytes = math.prod(rows.shape[1:]) * rows.itemsize
    if max(counts) * row_bytes > room:
        return _by_mpi(topology, rows, counts)
    topology.lock.is_shared_memory_only = True
    array = np.empty((sum(counts), *rows.shape[1:]), rows.dtype)
    ends = [_LENGTH_BYTES + count * row_bytes for count in counts]
    found = [slot[_LENGTH_BYTES:end] for slot, end in zip(slots, ends, strict=True)]
    np.concatenate(found, out=as_bytes(array))
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
        whole = Gathered.like(rows, lengths_by_mpi(topology, rows))
    else:
        cells = _meet_with_cells(topology, rows, cell)
        whole = Gathered.like(rows, [int(each) for each in cells.view(np.int64)[:, 0]])
        if max(map(len, whole.parts)) <= cell - _LENGTH_BYTES:
            for part, each in zip(whole.parts, cells, strict=True):
                part[...] = each[_LENGTH_BYTES : _LENGTH_BYTES + len(part)]
            return whole.array
    whole.parts[topology.rank][...] = data
    if len(set(topology.ranks_per_node)) > 1:
        _gather_bytes(topology.world, topology.limits, whole, range(topology.size))
        return whole.array
    rails = [sorted(rail) for rail in zip(*topology.nodes, strict=True)]
    _gather_bytes(topology.rail, topology.limits, whole, rails[memory.rank])
    if memory.size > 1:
        _exchange(topology, [[whole.parts[rank] for rank in rail] for rail in rails])
    return whole.array


def _meet_with_cells(topology: Topology, rows: np.ndarray, cell: int) -> np.ndarray:
    """Exchange each rank's number of rows and first bytes with the agreement, as bytes of the shape (ranks, cell)."""
    memory = topology.node_memory
    own_length, _ = memory.slots(_LENGTH, 1)
    own, slots = memory.slots(_BYTE, cell)
    first = as_bytes(rows)[: cell - _LENGTH_BYTES]
    own_length[0] = len(rows)
    own[_LENGTH_BYTES : _LENGTH_BYTES + len(first)] = first

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
        own, slots = memory.slots(_BYTE, memory.slot_bytes)
        write_piece(pieces[memory.rank], own)
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
    lengths = tuple(sum(map(len, each)) for each in parts)
    one_node = topology.shares_all
    what = operation("all_gather of parts", form, lengths)
    with topology.lock.collective(what, one_node and any(lengths), timeout_seconds):
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
        got = np.empty(ends[-1], np.uint8)
        of_ranks = [got[end - count : end] for end, count in zip(ends, counts, strict=True)]
        write_piece(pieces[comm.rank], of_ranks[comm.rank])
        comm.Allgatherv(mpi.start().IN_PLACE, [got, counts])
        for rank, piece in enumerate(pieces):
            if rank != comm.rank:
                read_piece(piece, of_ranks[rank])


def lengths_by_mpi(topology: Topology, rows: Any) -> list[int]:
    lengths = np.empty(topology.size, np.int64)
    topology.world.Allgather(np.array([len(rows)], np.int64), lengths)
    return [int(length) for length in lengths]


def _gather_bytes(comm: Any, limits: Limits, whole: Gathered, ranks: Sequence[int]) -> None:
    """Fill the parts of all ranks of ``comm``. ``ranks`` are their world ranks; this rank's own is filled already."""
    if whole.starts[-1] <= limits.gathered_bytes:
        counts = [len(whole.parts[rank]) for rank in ranks]
        starts = [whole.starts[rank] for rank in ranks]
        comm.Allgatherv(mpi.start().IN_PLACE, [as_bytes(whole.array), (counts, starts)])
        return
    # Older MPI libraries cannot count beyond 2^31: send each rank's part in pieces.
    for root, rank in enumerate(ranks):
        part = whole.parts[rank]
        for start in range(0, len(part), limits.message_bytes):
            comm.Bcast(part[start : start + limits.message_bytes], root)


def gather(topology: Topology, value: np.ndarray, axis: int, root: int) -> np.ndarray | None:
    """Do as `all_gather`, in the order of ranks, for rank ``root`` alone. Return None on other ranks."""
    with structures.refusals("gather", topology):
        axis = checked_axis(value, axis)
    rows = np.ascontiguousarray(np.moveaxis(value, axis, 0))
    what = operation("gather", root, axis, value.ndim, (value.dtype, rows.shape[1:]))
    with topology.lock.collective(what):
        if topology.size == 1:
            return value.copy(order="C")
        lengths = lengths_by_mpi(topology, rows)
        sends: list[np.ndarray | None] = [None] * topology.size
        sends[root] = as_bytes(rows)
        if topology.rank != root:
            exchange(topology, sends, [None] * topology.size)
            return None
        whole = Gathered.like(rows, lengths)
        exchange(topology, sends, whole.parts)
    return np.ascontiguousarray(np.moveaxis(whole.array, 0, axis))


def gather_object(topology: Topology, value: Any, root: int) -> list[Any] | None:
    """Return every rank's (pickled) object, in the order of ranks. Return None on other ranks than ``root``."""
    what = operation("gather_object", root)
    if topology.size == 1:
        with topology.lock.collective(what):
            return [value]
    mine = topology.pickled("gather_object", value)
    with topology.lock.collective(what):
        told = topology.world.gather(mine, root)
    return None if told is None else [mpi.start().pickle.loads(each) for each in told]
