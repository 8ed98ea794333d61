"""The packing of arrays on a GPU into few messages: copies are cheap there, and each message costs its latency."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.collectives import dtypes
from mpistrat.collectives.division import divide
from mpistrat.collectives.operations import COMBINE, Op
from mpistrat.runtime.device import cupy_for
from mpistrat.runtime.gpu import kernels
from mpistrat.values import ReduceOp

PACK_BYTES = 64 << 20  # of a message of several arrays
_ALONE_BYTES = 8 << 20  # a larger array is a message of its own
_SMALL = 1 << 10  # elements; of a longer message a number is copied: a view would keep it all

Key = tuple[tuple[np.dtype, tuple[int, ...]], ...]


class GpuBucket(NamedTuple):
    """Arrays of one dtype that are reduced as one message.

    Attributes
    ----------
    members, starts : tuple of int
        The indices of the arrays in the list, and their starts in the message.
    length : int
        The number of elements of the message.
    source, wire, result : numpy.dtype
        The dtype of the arrays, the dtype in which they are combined, and the dtype of the results.
    combine : numpy.ufunc
    divisor : int
        The number of replicas for a mean, else 1.
    """

    members: tuple[int, ...]
    starts: tuple[int, ...]
    length: int
    source: np.dtype
    wire: np.dtype
    result: np.dtype
    combine: np.ufunc
    divisor: int


class PackedBucket(NamedTuple):
    """A flat message and the array for its reduction, of one length; may be the same array."""

    bucket: GpuBucket
    message: Any
    total: Any


def plan(op: Op, key: Key, size: int, bytes_per_pack: int = 0) -> tuple[GpuBucket, ...]:
    """Divide a list of arrays into buckets, from the last array on; leave out arrays without elements.

    Raises
    ------
    TypeError
        If one of the arrays cannot be reduced by ``op``.
    """
    buckets: list[GpuBucket] = []
    open_: dict[np.dtype, list[int]] = {}
    filled: dict[np.dtype, int] = {}
    for i in reversed(range(len(key))):
        dtype, shape = key[i]
        dtypes.accumulator(dtype, op)  # raises before any rank communicates
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes >= _ALONE_BYTES:
            buckets.append(bucket(op, key, [i], size))
        elif nbytes:
            open_.setdefault(dtype, []).insert(0, i)
            filled[dtype] = filled.get(dtype, 0) + nbytes
            if filled[dtype] > (bytes_per_pack or PACK_BYTES):
                buckets.append(bucket(op, key, open_.pop(dtype), size))
                del filled[dtype]
    return (*buckets, *(bucket(op, key, members, size) for members in open_.values()))


def bucket(op: Op, key: Key, members: Sequence[int], size: int) -> GpuBucket:
    """Return the bucket of some arrays of one dtype, over ``size`` ranks."""
    dtype = key[members[0]][0]
    ends = [0, *itertools.accumulate(math.prod(key[i][1]) for i in members)]
    return GpuBucket(
        tuple(members),
        tuple(ends[:-1]),
        ends[-1],
        dtype,
        dtypes.accumulator(dtype, op),
        dtypes.result(dtype, op),
        COMBINE[op],
        size if op is ReduceOp.MEAN else 1,
    )


def pack(bucket: GpuBucket, arrays: Sequence[Any]) -> Any:
    """Return the arrays of a bucket as one message, copied in one launch; a single array is not copied."""
    cupy = cupy_for("an array on a GPU")
    mine = [cupy.ascontiguousarray(arrays[i]) for i in bucket.members]
    if len(mine) == 1:
        return mine[0].reshape(-1)
    message = cupy.empty(bucket.length, bucket.source)
    kernels.copy_each(mine, [message[start : start + each.size] for start, each in _places(bucket, mine)])
    return message


def unpack(bucket: GpuBucket, total: Any, shapes: Sequence[tuple[int, ...]], out: list[Any]) -> None:
    """Put views of a flat result into ``out`` at the indices of the bucket's members."""
    for i, start in zip(bucket.members, bucket.starts, strict=True):
        part = total[start : start + math.prod(shapes[i])].reshape(shapes[i])
        out[i] = part.copy() if part.size == 1 and bucket.length > _SMALL else part


def widened(job: PackedBucket) -> Any:
    """Return the message in the dtype in which it is combined; a copy if that is another dtype."""
    message, wire = job.message, job.bucket.wire
    if message.dtype == wire:
        return message
    return message.astype(wire)


def finish(job: PackedBucket, wide: Any) -> None:
    """Write the combination to the total, divided for a mean and rounded to the dtype of the result."""
    bucket, total = job.bucket, job.total
    if bucket.divisor == 1:
        if wide is not total:
            total[...] = wide
        return
    if wide.dtype.kind in "iu" or bucket.result == wide.dtype:
        divide(wide, bucket.divisor, total)
    else:
        total[...] = divide(wide, bucket.divisor)


def _places(bucket: GpuBucket, arrays: Sequence[Any]) -> zip[tuple[int, Any]]:
    return zip(bucket.starts, arrays, strict=True)
