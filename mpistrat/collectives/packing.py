"""Many arrays, few messages: how a list of arrays is cut into buckets.

Small arrays of one dtype are fused into one bucket; a large array is a bucket of its own and is not
copied. The plan of a list depends on dtypes and shapes only, and is made once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.collectives import dtypes
from mpistrat.collectives.algorithm import Algorithm
from mpistrat.collectives.choose import choose
from mpistrat.runtime.device import Device
from mpistrat.runtime.operation import Operation
from mpistrat.runtime.topology import Topology
from mpistrat.values import ReduceOp

ALONE_BYTES = 64 << 10  # from here on copying an array costs more than a message of its own
CONVERTED = 256 << 10  # elements of an array that are converted to the dtype of the wire at a time

Key = tuple[tuple[np.dtype, tuple[int, ...]], ...]


class Bucket(NamedTuple):
    """Arrays of one dtype that are reduced in one message.

    Attributes
    ----------
    members : tuple of int
        Their places in the list.
    slices, shapes : tuple
        Where each lies in the flat message, and its shape (None where it is flat).
    length : int
        Elements of the message.
    wire, result : numpy.dtype
        The dtype in which they are added, and the one they are given back in.
    divisor : int
        What the sum is divided by; 1 for a sum.
    algorithm : Algorithm
    """

    members: tuple[int, ...]
    slices: tuple[slice, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    length: int
    wire: np.dtype
    result: np.dtype
    divisor: int
    algorithm: Algorithm


class Plan(NamedTuple):
    """How a list of arrays of given dtypes and shapes is reduced.

    Attributes
    ----------
    operation : Operation
        What all ranks must agree on.
    buckets : tuple of Bucket
        The messages.
    empty : tuple of (int, numpy.dtype)
        The arrays without elements and the dtypes of their results.
    """

    operation: Operation
    buckets: tuple[Bucket, ...]
    empty: tuple[tuple[int, np.dtype], ...]


def plan(
    topology: Topology, op: ReduceOp, key: Key, bytes_per_pack: int = 0, algorithm: str | None = None
) -> Plan:
    """Cut a list into buckets: the last arrays first, since their gradients are ready first.

    Raises
    ------
    TypeError
        If one of the arrays cannot be reduced by ``op``.
    """
    groups: dict[np.dtype, list[int]] = {}
    packed: dict[np.dtype, int] = {}
    buckets: list[Bucket] = []
    empty = []

    def close(dtype: np.dtype, members: list[int]) -> None:
        wire = dtypes.accumulator(dtype, op)
        lengths = [math.prod(key[i][1]) for i in members]
        ends = list(itertools.accumulate(lengths))
        buckets.append(
            Bucket(
                tuple(members),
                tuple(slice(end - n, end) for end, n in zip(ends, lengths, strict=True)),
                tuple(None if len(key[i][1]) == 1 else key[i][1] for i in members),
                ends[-1],
                wire,
                dtypes.result(dtype, op),
                topology.size if op is ReduceOp.MEAN else 1,
                choose(topology, ends[-1] * wire.itemsize, wire, Device("cpu"), algorithm),
            )
        )

    for i in reversed(range(len(key))):
        dtype, shape = key[i]
        dtypes.accumulator(dtype, op)  # raises where it must before anything is sent
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes >= ALONE_BYTES:
            close(dtype, [i])
        elif nbytes:
            groups.setdefault(dtype, []).append(i)
            packed[dtype] = packed.get(dtype, 0) + nbytes
            if bytes_per_pack and packed[dtype] > bytes_per_pack:
                close(dtype, groups.pop(dtype))
                del packed[dtype]
        else:
            empty.append((i, dtypes.result(dtype, op)))
    for dtype, members in groups.items():
        close(dtype, members)
    operation = Operation("all_reduce", op.name, key, bytes_per_pack or None, algorithm)
    return Plan(operation, tuple(buckets), tuple(empty))


def reduce(topology: Topology, plan: Plan, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """New arrays that hold the reduction of ``arrays`` over the ranks. The caller holds the turn."""
    out: list[Any] = [None] * len(arrays)
    for bucket in plan.buckets:
        _reduce_bucket(topology, bucket, arrays, out)
    for i, dtype in plan.empty:
        out[i] = np.empty(arrays[i].shape, dtype)
    return out


def _reduce_bucket(topology: Topology, bucket: Bucket, arrays: Sequence[np.ndarray], out: list[Any]) -> None:
    if len(bucket.members) == 1:
        (i,) = bucket.members
        out[i] = _reduce_one(topology, bucket, arrays[i])
    else:
        _reduce_many(topology, bucket, arrays, out)


def _reduce_many(topology: Topology, bucket: Bucket, arrays: Sequence[np.ndarray], out: list[Any]) -> None:
    packed = np.empty(bucket.length, bucket.wire)
    np.concatenate([arrays[i] for i in bucket.members], axis=None, out=packed, casting="same_kind")
    bucket.algorithm.sum(topology, packed, packed)
    packed = _finish(bucket, packed)
    if bucket.shapes.count(None) == len(bucket.shapes):  # all flat: no Python step for each
        views: Iterable[np.ndarray] = map(packed.__getitem__, bucket.slices)
    else:
        views = (
            packed[where] if shape is None else packed[where].reshape(shape)
            for where, shape in zip(bucket.slices, bucket.shapes, strict=True)
        )
    for i, view in zip(bucket.members, views, strict=True):
        out[i] = view


def _reduce_one(topology: Topology, bucket: Bucket, array: np.ndarray) -> np.ndarray:
    if array.dtype != bucket.wire:
        return _reduce_converted(topology, bucket, array.reshape(-1)).reshape(array.shape)
    total = np.empty(array.shape, bucket.wire)
    send = array if array.flags.c_contiguous else array.copy(order="C")
    bucket.algorithm.sum(topology, send, total)
    return _finish(bucket, total)


def _reduce_converted(topology: Topology, bucket: Bucket, flat: np.ndarray) -> np.ndarray:
    """In pieces, so that the wider copy stays in the cache."""
    total = np.empty(bucket.length, bucket.result)
    for start in range(0, bucket.length, CONVERTED):
        piece = slice(start, start + CONVERTED)
        wide = flat[piece].astype(bucket.wire)
        bucket.algorithm.sum(topology, wide, wide)
        total[piece] = _finish(bucket, wide)
    return total


def _finish(bucket: Bucket, total: np.ndarray) -> np.ndarray:
    """Divide for a mean, in place where the dtype allows, and round to the dtype of the result."""
    if bucket.divisor != 1:
        if total.dtype.kind in "iu":
            return np.asarray(total / bucket.divisor)
        np.divide(total, total.dtype.type(bucket.divisor), out=total)
    return total if total.dtype is bucket.result else total.astype(bucket.result, copy=False)
