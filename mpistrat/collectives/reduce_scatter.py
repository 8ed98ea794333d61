"""The reduce-scatter: every replica gets its part of the reduction of all replicas' values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.collectives.algorithms.exact import exact_sum_of_rows
from mpistrat.collectives.algorithms.mpi import mpi_operation
from mpistrat.collectives.algorithms.tree import combine_rows, combine_tree, shares_of_ranks
from mpistrat.collectives.operations import COMBINE, Op, accumulator, divide, result_dtype
from mpistrat.collectives.reduction import cut, new_array, write_piece
from mpistrat.runtime.agreement.operation import Operation, operation
from mpistrat.runtime.topology import Limits, Topology
from mpistrat.values import ReduceOp

Parts = Sequence[Sequence[np.ndarray]]
_BY_ROWS = ("ordered", "exact", "tree")  # which combine the values of all ranks at once
# Smaller parts go by MPI_Reduce_scatter, in fewer and larger steps than a ring's.
_RING_BYTES = 8 << 10


def reduce_scatter(topology: Topology, op: Op, value: np.ndarray, timeout_seconds: float | None = None) -> np.ndarray:
    """Return this replica's part, along the first axis, of the reduction of values of one shape and dtype.

    `rows_of_ranks` returns the sizes of the parts. Where all nodes have equally many ranks, a node sends
    ``(nodes - 1) / nodes`` of the bytes, the minimum. Raise ValueError for a scalar, and on every rank if shapes or
    dtypes differ, and TypeError if ``op`` cannot reduce the values.
    """
    rows = rows_of_ranks(value, topology.size)
    flat = np.ascontiguousarray(value).reshape(-1)
    width = math.prod(value.shape[1:])
    ends = [0, *itertools.accumulate([count * width for count in rows])]
    parts = [[flat[first:last]] for first, last in itertools.pairwise(ends)]
    description = operation("reduce_scatter", op.name, (value.dtype, value.shape))
    total = reduce_parts(topology, op, value.dtype, parts, description, None, timeout_seconds)
    return total.reshape(rows[topology.rank], *value.shape[1:])


def reduce_parts(
    topology: Topology,
    op: Op,
    dtype: np.dtype,
    parts: Parts,
    description: Operation,
    algorithm: str | None,
    timeout_seconds: float | None,
    rows_of: Callable[[np.ndarray], list[np.ndarray]] | None = None,
) -> np.ndarray:
    """Return the reduction of this rank's part as one flat array. The ranks compare ``description``.

    ``parts`` are, for each rank, the flat arrays of which it gets the reduction, of the same lengths on all ranks. With
    "ordered", "exact" and "tree" the bits are as in the all-reduce. If all arrays lie in shared memory,
    ``rows_of(array)`` returns the same elements of every rank.
    """
    wire = accumulator(dtype, op)
    one_node = topology.shares_all
    by_rows = algorithm in _BY_ROWS
    even = topology.memory is not None and len(set(topology.ranks_per_node)) == 1
    tiers = topology.size > 1 and even and (one_node or not by_rows)
    # The agreement between nodes takes two barriers, so this slot would be in use again after it.
    meets = rows_of is not None or (tiers and one_node and any(map(len, itertools.chain(*parts))))
    with np.errstate(all="ignore"), topology.lock.collective(description, meets, timeout_seconds):
        if topology.size == 1:
            total = _joined(parts[0], dtype).astype(wire)
        elif rows_of is not None:
            topology.lock.meet()
            total, done = new_array(sum(map(len, parts[topology.rank])), wire), 0
            for array in parts[topology.rank]:
                into = total[done : done + len(array)]
                _combine(topology, COMBINE[op], rows_of(array), into, algorithm)
                done += len(array)
            topology.lock.meet()  # before a rank writes to its arrays again
        elif tiers:
            total = _on_two_tiers(topology, COMBINE[op], parts, dtype, wire, algorithm)
        elif by_rows:
            total = _by_rows(topology, COMBINE[op], parts, dtype, wire, algorithm)
        else:
            total = _by_mpi(topology, COMBINE[op], [_joined(arrays, dtype) for arrays in parts], wire)
        if op is ReduceOp.MEAN:
            total = divide(total, topology.size)
    return total.astype(result_dtype(dtype, op), copy=False)


def _joined(arrays: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, dtype), *arrays])


def _combine(
    topology: Topology, combine: np.ufunc, rows: list[np.ndarray], out: np.ndarray, algorithm: str | None
) -> None:
    """Write the combination of all ranks' rows to ``out``, as the all-reduce of this algorithm adds them."""
    if algorithm == "exact" and combine is np.add and out.dtype.kind in "fc":
        exact_sum_of_rows(rows, out)
    elif algorithm == "tree":
        shares = shares_of_ranks(topology)
        parts = {tree: row for (tree,), row in zip(shares.of_rank, rows, strict=True)}
        combine_tree(combine, parts, shares.tree, out)
    else:
        combine_rows(combine, rows, out)


def rows_of_ranks(value: Any, size: int) -> list[int]:
    """Return the number of rows that each rank gets: the first ones may get one more. Raise ValueError for a scalar."""
    if value.ndim == 0:
        raise ValueError("a scalar has no axis to scatter along: use all_reduce")
    return [len(value) // size + (rank < len(value) % size) for rank in range(size)]


def _on_two_tiers(
    topology: Topology, combine: np.ufunc, parts: Parts, dtype: np.dtype, wire: np.dtype, algorithm: str | None
) -> np.ndarray:
    """Combine inside each node the parts that each rail needs, then combine these along the rails."""
    memory = topology.node_memory
    of_rails = [sorted(rail) for rail in zip(*topology.nodes, strict=True)]
    # A rank combines for its rail: the parts of the ranks that have its number on any node.
    rails = [[*itertools.chain(*(parts[rank] for rank in rail))] for rail in of_rails]
    total, done = new_array(sum(map(len, rails[memory.rank])), wire), 0
    room = memory.slot_bytes // dtype.itemsize // memory.size
    for pieces in itertools.zip_longest(*(cut(rail, room) for rail in rails), fillvalue=()):
        own_slot, slots = memory.slots(dtype, room * memory.size)
        own_piece = pieces[memory.rank]
        for i, piece in enumerate(pieces):
            if i != memory.rank or len(own_piece) > 1:  # one array is combined where it is
                write_piece(piece, own_slot[i * room : (i + 1) * room])
        topology.lock.meet()
        count = sum(len(part) for _, part in own_piece)
        if count:
            first = memory.rank * room
            rows = [slot[first : first + count] for slot in slots]
            if len(own_piece) == 1:
                rows[memory.rank] = own_piece[0][1]
            _combine(topology, combine, rows, total[done : done + count], algorithm)
            done += count
    ends = [0, *itertools.accumulate(sum(map(len, parts[rank])) for rank in of_rails[memory.rank])]
    return _on_rail(topology, combine, [total[first:last] for first, last in itertools.pairwise(ends)])


def _by_rows(
    topology: Topology, combine: np.ufunc, parts: Parts, dtype: np.dtype, wire: np.dtype, algorithm: str | None
) -> np.ndarray:
    """Give each rank all ranks' values of its part, in rounds of bounded memory."""
    total, done = np.empty(sum(map(len, parts[topology.rank])), wire), 0
    room = max(1, topology.limits.chunk_bytes // dtype.itemsize // topology.size)
    for pieces in itertools.zip_longest(*(cut(arrays, room) for arrays in parts), fillvalue=()):
        counts = [sum(len(part) for _, part in piece) for piece in pieces]
        send, count = np.concatenate([part for piece in pieces for _, part in piece]), counts[topology.rank]
        rows = np.empty((topology.size, count), dtype)
        topology.world.Alltoallv(
            [as_bytes(send), np.multiply(counts, dtype.itemsize)],
            [as_bytes(rows), np.full(topology.size, count * dtype.itemsize)],
        )
        if count:
            _combine(topology, combine, [*rows], total[done : done + count], algorithm)
            done += count
    return total


def _on_rail(topology: Topology, combine: np.ufunc, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the combination of ``parts[rank]`` over the rail. The other parts are overwritten."""
    comm = topology.rail
    own_part, longest = parts[comm.rank], max(parts, key=len)
    if comm.size == 1 or not len(longest):
        return own_part
    if longest.nbytes >= _RING_BYTES:
        _on_ring(comm, topology.limits, combine, parts)
        return own_part
    total = np.empty_like(own_part)
    counts = [len(part) for part in parts]
    comm.Reduce_scatter(np.concatenate(parts), total, counts, mpi_operation(combine, own_part.dtype))
    return total


def _on_ring(comm: Any, limits: Limits, combine: np.ufunc, parts: Sequence[np.ndarray]) -> None:
    """Combine each part in place on its way round a ring to its owner (Patarasuk and Yuan 2009, first half)."""
    size, rank = comm.size, comm.rank
    longest = max(map(len, parts))
    step = max(1, limits.message_bytes // parts[0].itemsize)
    scratch = np.empty(min(step, longest), parts[0].dtype)
    after, before = (rank + 1) % size, (rank - 1) % size
    for i in range(1, size):
        # After step i a part has the values of i + 1 ranks. The last step completes this rank's own part.
        send, target = parts[(rank - i) % size], parts[(rank - i - 1) % size]
        for start in range(0, longest, step):
            piece = target[start : start + step]
            received = scratch[: len(piece)]
            comm.Sendrecv(send[start : start + step], after, recvbuf=received, source=before)
            combine(piece, received, out=piece)


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
