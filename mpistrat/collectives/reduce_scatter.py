"""The reduce-scatter: every replica gets its part of the reduction of all replicas' values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.collectives.algorithms.mpi import mpi_operation
from mpistrat.collectives.arithmetic import dtypes
from mpistrat.collectives.arithmetic.combine_rows import combine_rows
from mpistrat.collectives.arithmetic.division import divide
from mpistrat.collectives.arithmetic.operations import COMBINE, Op
from mpistrat.collectives.pieces import cut, lay
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.limits import Limits
from mpistrat.runtime.topology import Topology
from mpistrat.values import ReduceOp

# Smaller parts go by MPI_Reduce_scatter, in fewer and larger steps than those of a ring.
_RING_BYTES = 8 << 10


def reduce_scatter(
    topology: Topology, op: Op, value: np.ndarray, timeout_seconds: float | None = None
) -> np.ndarray:
    """Return this replica's part, along the first axis, of the reduction over all replicas.

    The parts are as even as possible: of ``n`` rows over ``size`` replicas, the first ``n % size`` replicas get one row
    more than the others. Where all nodes have equally many ranks, every node sends ``(nodes - 1) / nodes`` of the
    bytes, which is the minimum. The value has the same shape and dtype on all ranks. ``timeout_seconds`` is as in
    `CollectiveLock.turn`.

    Raise ValueError if the value is a scalar, and on every rank if shapes or dtypes differ between ranks. Raise
    TypeError if values of this dtype cannot be reduced by ``op``.
    """
    rows = rows_of_ranks(value, topology.size)
    wire = dtypes.accumulator(value.dtype, op)
    flat = np.ascontiguousarray(value).reshape(-1)
    width = math.prod(value.shape[1:])
    ends = [0, *itertools.accumulate([each * width for each in rows])]
    parts = [flat[first:last] for first, last in itertools.pairwise(ends)]
    tiers = topology.size > 1 and topology.memory is not None and len(set(topology.ranks_per_node)) == 1
    # The agreement between nodes takes two barriers, so this slot would be in use again after it.
    meets = tiers and len(flat) > 0 and len(topology.nodes) == 1
    what = operation("reduce_scatter", op.name, (value.dtype, value.shape))
    with np.errstate(all="ignore"), topology.lock.turn(what, meets, timeout_seconds):
        if topology.size == 1:
            total = flat.astype(wire)
        elif tiers:
            total = _on_two_tiers(topology, COMBINE[op], parts, wire)
        else:
            total = _by_mpi(topology, COMBINE[op], parts, wire)
        if op is ReduceOp.MEAN:
            total = divide(total, topology.size)
    return total.astype(dtypes.result(value.dtype, op), copy=False).reshape(
        rows[topology.rank], *value.shape[1:]
    )


def rows_of_ranks(value: Any, size: int) -> list[int]:
    """Return the number of rows of an array that each of ``size`` ranks gets.

    Raise ValueError if the array is a scalar.
    """
    if value.ndim == 0:
        raise ValueError("a scalar has no axis to scatter along: use all_reduce")
    return [len(value) // size + (rank < len(value) % size) for rank in range(size)]


def _on_two_tiers(
    topology: Topology, combine: np.ufunc, parts: Sequence[np.ndarray], wire: np.dtype
) -> np.ndarray:
    """Combine inside each node the parts that each rail needs, then combine these along the rails."""
    memory = topology.memory
    assert memory is not None
    rails = [[parts[rank] for rank in sorted(rail)] for rail in zip(*topology.nodes, strict=True)]
    mine = rails[memory.rank]
    total, done = np.empty(sum(map(len, mine)), wire), 0
    dtype = parts[0].dtype
    room = memory.slot_bytes // dtype.itemsize // memory.size
    for pieces in itertools.zip_longest(*(cut(rail, room) for rail in rails), fillvalue=()):
        own, slots = memory.slots(dtype, room * memory.size)
        for i, piece in enumerate(pieces):
            lay(piece, own[i * room : (i + 1) * room])
        topology.lock.meet()
        count = sum(len(part) for _, part in pieces[memory.rank])
        if count:
            first = memory.rank * room
            rows = [slot[first : first + count] for slot in slots]
            combine_rows(combine, rows, total[done : done + count])
            done += count
    ends = [0, *itertools.accumulate(map(len, mine))]
    return _on_rail(topology, combine, [total[first:last] for first, last in itertools.pairwise(ends)])


def _on_rail(topology: Topology, combine: np.ufunc, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the combination of ``parts[rank]`` over the rail. The other parts are overwritten."""
    comm = topology.rail
    own, longest = parts[comm.rank], max(parts, key=len)
    if comm.size == 1 or not len(longest):
        return own
    if longest.nbytes >= _RING_BYTES:
        _on_ring(comm, topology.limits, combine, parts)
        return own
    total = np.empty_like(own)
    counts = [len(part) for part in parts]
    comm.Reduce_scatter(np.concatenate(parts), total, counts, mpi_operation(combine, own.dtype))
    return total


def _on_ring(comm: Any, limits: Limits, combine: np.ufunc, parts: Sequence[np.ndarray]) -> None:
    """Combine each part in place on its way round a ring that ends at its owner.

    This is the first half of Patarasuk and Yuan (2009): every rank sends each part but its own once.
    """
    size, rank = comm.size, comm.rank
    longest = max(map(len, parts))
    step = max(1, limits.message_bytes // parts[0].itemsize)
    scratch = np.empty(min(step, longest), parts[0].dtype)
    after, before = (rank + 1) % size, (rank - 1) % size
    for i in range(1, size):
        send, mine = parts[(rank - i) % size], parts[(rank - i - 1) % size]
        for start in range(0, longest, step):
            piece = mine[start : start + step]
            theirs = scratch[: len(piece)]
            comm.Sendrecv(send[start : start + step], after, recvbuf=theirs, source=before)
            combine(piece, theirs, out=piece)


def _by_mpi(topology: Topology, combine: np.ufunc, parts: Sequence[np.ndarray], wire: np.dtype) -> np.ndarray:
    """Call ``MPI_Reduce_scatter`` (MPI 4.1 section 6.10) for pieces, each with elements of every rank's part."""
    total = np.empty(len(parts[topology.rank]), wire)
    step = max(_RING_BYTES, topology.limits.chunk_bytes // topology.size) // wire.itemsize
    for start in range(0, max(map(len, parts)), step):
        pieces = [part[start : start + step] for part in parts]
        send = np.concatenate(pieces, dtype=wire)
        counts = [len(piece) for piece in pieces]
        topology.world.Reduce_scatter(send, total[start : start + step], counts, mpi_operation(combine, wire))
    return total
