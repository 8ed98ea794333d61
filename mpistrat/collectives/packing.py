"""The all-reduce of a list of arrays in few messages, by buckets and pieces.

Small arrays of one dtype are joined in one bucket; a large array is a bucket of its own. A bucket is reduced piece by
piece. The plan of a list depends on dtypes and shapes only, and is made once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.collectives import dtypes
from mpistrat.collectives.algorithms.choose import choose, piece_bytes
from mpistrat.collectives.algorithms.contract import Algorithm
from mpistrat.collectives.division import divide
from mpistrat.collectives.operations import COMBINE, Op
from mpistrat.runtime.agreement.operation import Operation
from mpistrat.runtime.device import Device
from mpistrat.runtime.memory.buffer_pool import Buffers
from mpistrat.runtime.topology import Topology
from mpistrat.values import ReduceOp

# New memory costs a page fault for every 4 KiB of a result, which takes longer than the sum. A training step has as
# many results as gradients, so their memory is reused.
_results = Buffers()
SMALL = 4096  # elements; up to this length new memory is cheaper than the buffer pool

_PACK_BYTES = 4 << 20  # of small arrays in one message
_BETWEEN_NODES = 16  # the cost of a message between nodes, relative to one inside a node

Key = tuple[tuple[np.dtype, tuple[int, ...]], ...]


class Run(NamedTuple):
    """Arrays of one shape that follow each other in a message."""

    where: slice
    length: int
    shape: tuple[int, ...]


class Bucket(NamedTuple):
    """Arrays of one dtype that are reduced as one message.

    Attributes
    ----------
    members : tuple of int
        The indices of the arrays in the list, ascending.
    runs : tuple of Run
        The place of each array in the message.
    length, piece : int
        The number of elements of the bucket, and of one piece.
    axis : int or None
        The axis along which the arrays are joined: 0 if all are vectors, else None, which flattens and is slower.
    source, wire, result : numpy.dtype
        The dtype of the arrays, the dtype in which they are combined, and the dtype of the results.
    combine : numpy.ufunc
    divisor : int
        The number of replicas for a mean, else 1.
    algorithm : Algorithm
    """

    members: tuple[int, ...]
    runs: tuple[Run, ...]
    length: int
    piece: int
    axis: int | None
    source: np.dtype
    wire: np.dtype
    result: np.dtype
    combine: np.ufunc
    divisor: int
    algorithm: Algorithm


class Plan(NamedTuple):
    """The plan of the all-reduce of a list of arrays of given dtypes and shapes.

    Attributes
    ----------
    operation : Operation
        The description that the ranks compare.
    buckets : tuple of Bucket
        The buckets in the order of their messages.
    empty : tuple of (int, numpy.dtype)
        The indices of arrays without elements and the dtypes of their results.
    meets : bool
        Whether the ranks agree with the first message.
    """

    operation: Operation
    buckets: tuple[Bucket, ...]
    empty: tuple[tuple[int, np.dtype], ...]
    meets: bool


def plan(
    topology: Topology,
    op: Op,
    key: Key,
    bytes_per_pack: int = 0,
    algorithm: str | None = None,
    form: Hashable = None,
) -> Plan:
    """Divide a list of arrays into buckets, from the last array on, since its gradient is ready first.

    ``form`` is the form of the structure whose leaves the arrays are. The ranks compare it.

    Raises
    ------
    TypeError
        If one of the arrays cannot be reduced by ``op``.
    """
    open_buckets: dict[np.dtype, list[int]] = {}
    packed: dict[np.dtype, int] = {}
    buckets: list[Bucket] = []
    empty = []

    def close(dtype: np.dtype, members: list[int]) -> None:
        buckets.append(_bucket(topology, op, key, dtype, members[::-1], algorithm))

    for i in reversed(range(len(key))):
        dtype, shape = key[i]
        wire = dtypes.accumulator(dtype, op)  # raises before any rank communicates
        nbytes = math.prod(shape) * dtype.itemsize
        on_wire = math.prod(shape) * wire.itemsize
        alone, most = _limits(topology, wire, bytes_per_pack, algorithm)
        if nbytes >= alone or on_wire > most:
            close(dtype, [i])
        elif nbytes:
            if packed.get(dtype, 0) + on_wire > most:
                close(dtype, open_buckets.pop(dtype))
                del packed[dtype]
            open_buckets.setdefault(dtype, []).append(i)
            packed[dtype] = packed.get(dtype, 0) + on_wire
            if bytes_per_pack and packed[dtype] * dtype.itemsize > bytes_per_pack * wire.itemsize:
                close(dtype, open_buckets.pop(dtype))
                del packed[dtype]
        else:
            empty.append((i, dtypes.result(dtype, op)))
    for dtype, members in open_buckets.items():
        close(dtype, members)
    operation = Operation("all_reduce", op.name, key, form, bytes_per_pack or None, algorithm)
    meets = bool(buckets) and all(bucket.algorithm.meets for bucket in buckets)
    return Plan(operation, tuple(buckets), tuple(empty), meets)


def _limits(
    topology: Topology, wire: np.dtype, bytes_per_pack: int, algorithm: str | None
) -> tuple[float, float]:
    """Return the bytes from which an array is a bucket of its own, and the most bytes of a bucket of others."""
    between_nodes = len(topology.nodes) > 1
    alone = topology.limits.alone_bytes * (_BETWEEN_NODES if between_nodes else 1)
    if bytes_per_pack:
        return max(alone, bytes_per_pack), math.inf
    if between_nodes:
        return alone, _PACK_BYTES * 2
    return alone, min(_PACK_BYTES, piece_bytes(topology, wire, Device("cpu"), algorithm))


def _bucket(
    topology: Topology, op: Op, key: Key, dtype: np.dtype, members: list[int], name: str | None
) -> Bucket:
    wire = dtypes.accumulator(dtype, op)
    runs, start = [], 0
    for shape, group in itertools.groupby(members, key=lambda i: key[i][1]):
        count = len(list(group))
        stop = start + count * math.prod(shape)
        runs.append(Run(slice(start, stop), count, shape))
        start = stop
    algorithm = choose(topology, start * wire.itemsize, wire, Device("cpu"), name)
    result = dtypes.result(dtype, op)
    return Bucket(
        tuple(members),
        tuple(runs),
        start,
        max(1, algorithm.piece_bytes(topology) // wire.itemsize),
        0 if all(len(run.shape) == 1 for run in runs) else None,
        result if result == dtype else dtype,  # equal dtypes are one object, so that `is` compares them
        result if result == wire else wire,
        result,
        COMBINE[op],
        topology.size if op is ReduceOp.MEAN else 1,
        algorithm,
    )


def reduce_in_turn(
    topology: Topology, plan: Plan, arrays: Sequence[np.ndarray], timeout_seconds: float | None
) -> list[np.ndarray]:
    """Take the collective lock, `reduce` the arrays, and release the lock."""
    with topology.turn(plan.operation, plan.meets, timeout_seconds):
        return reduce(topology, plan, arrays)


def reduce(topology: Topology, plan: Plan, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return new arrays with the reduction of ``arrays`` over the ranks. The caller holds the collective lock."""
    out: list[Any] = [None] * len(arrays)
    topology.ignoring_float_errors(_reduce_buckets, topology, plan.buckets, arrays, out)
    for i, dtype in plan.empty:
        out[i] = np.empty(arrays[i].shape, dtype)
    return out


def _reduce_buckets(
    topology: Topology, buckets: Sequence[Bucket], arrays: Sequence[np.ndarray], out: list[Any]
) -> None:
    for bucket in buckets:
        if len(bucket.members) == 1:
            i = bucket.members[0]
            out[i] = reduce_one(topology, bucket, arrays[i])
        else:
            _reduce_many(topology, bucket, arrays, out)


def new_array(length: int, dtype: np.dtype) -> np.ndarray:
    """Return memory for a result. A large result reuses the memory of a former one without references."""
    return np.empty(length, dtype) if length <= SMALL else _results.empty((length,), dtype)


def reduce_one(topology: Topology, bucket: Bucket, array: np.ndarray) -> np.ndarray:
    """Return a new array with the reduction of one array, the only one of its bucket."""
    if not array.flags.c_contiguous:
        array = array.copy(order="C")
    if array.ndim == 1:
        return _reduce_flat(topology, bucket, array)
    return _reduce_flat(topology, bucket, array.reshape(-1)).reshape(array.shape)


def _reduce_flat(topology: Topology, bucket: Bucket, flat: np.ndarray) -> np.ndarray:
    total = new_array(bucket.length, bucket.result)
    _reduce_pieces(topology, bucket, flat, total)
    return total


def _reduce_many(topology: Topology, bucket: Bucket, arrays: Sequence[np.ndarray], out: list[Any]) -> None:
    total = new_array(bucket.length, bucket.result)
    message = total if bucket.source is bucket.result else np.empty(bucket.length, bucket.source)
    _concatenate(bucket, arrays, message)
    _reduce_pieces(topology, bucket, message, total)
    unpack(bucket, total, out)


def _concatenate(bucket: Bucket, arrays: Sequence[np.ndarray], message: np.ndarray) -> None:
    first, last = bucket.members[0], bucket.members[-1]
    if last - first + 1 == len(bucket.members):
        mine = arrays[first : last + 1]
    else:
        mine = [arrays[i] for i in bucket.members]
    np.concatenate(mine, bucket.axis, message)


def packed(bucket: Bucket, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return a copy of the arrays of a bucket as one message, in the dtype in which they are combined."""
    message = _results.empty((bucket.length,), bucket.wire)
    _concatenate(bucket, arrays, message)
    return message


def unpack(bucket: Bucket, total: np.ndarray, out: list[Any]) -> None:
    """Put views of a flat result into ``out`` at the indices of the bucket's members."""
    first, last = bucket.members[0], bucket.members[-1]
    consecutive = last - first + 1 == len(bucket.members)
    if consecutive and len(bucket.runs) == 1 and bucket.runs[0].shape:
        _, length, shape = bucket.runs[0]
        out[first : last + 1] = total.reshape(length, *shape)  # the iteration makes the views
        return
    views: list[np.ndarray] = []
    for where, length, shape in bucket.runs:
        part = total[where]
        if not shape:
            part = part.copy()  # a view of one number would keep the whole message in memory
        if length == 1 or not shape:
            views.extend(each.reshape(shape) for each in np.split(part, length))
        else:
            views.extend(part.reshape(length, *shape))
    if consecutive:
        out[first : last + 1] = views
    else:
        for i, view in zip(bucket.members, views, strict=True):
            out[i] = view


def _reduce_pieces(topology: Topology, bucket: Bucket, send: np.ndarray, total: np.ndarray) -> None:
    """Reduce a flat message piece by piece; ``total`` may be ``send``."""
    if bucket.length <= bucket.piece:
        _reduce_piece(topology, bucket, send, total)
        return
    for start in range(0, bucket.length, bucket.piece):
        part = slice(start, start + bucket.piece)
        piece = total[part]
        _reduce_piece(topology, bucket, piece if send is total else send[part], piece)


def _reduce_piece(topology: Topology, bucket: Bucket, send: np.ndarray, total: np.ndarray) -> None:
    if bucket.wire is bucket.result and bucket.divisor == 1:
        bucket.algorithm.reduce(topology, bucket.combine, send, total)
        return
    wide = total if bucket.wire is bucket.result else np.empty(len(total), bucket.wire)
    bucket.algorithm.reduce(topology, bucket.combine, send, wide)
    finish(bucket, wide, total)


def finish(bucket: Bucket, wide: np.ndarray, total: np.ndarray) -> None:
    """Divide for a mean, and round to the dtype of the result; ``total`` may be ``wide``."""
    if bucket.divisor != 1:
        if wide.dtype.kind in "iu":
            divide(wide, bucket.divisor, total)
            return
        divide(wide, bucket.divisor, wide)
    if wide is not total:
        total[...] = wide
