"""Many arrays, few messages: how a list of arrays is cut into buckets.

Small arrays of one dtype are fused into one bucket; a large array is a bucket of its own and is not
copied. The plan of a list depends on dtypes and shapes only, and is made once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpistrat.collectives import dtypes
from mpistrat.collectives.algorithm import Algorithm
from mpistrat.collectives.choose import choose
from mpistrat.runtime.device import Device
from mpistrat.runtime.operation import Operation
from mpistrat.runtime.topology import Topology
from mpistrat.values import ReduceOp

ALONE_BYTES = 64 << 10  # from here on copying an array costs more than a message of its own
HALF_CHUNK = 256 << 10  # elements of a half precision array that are widened at a time

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
    algorithm : Algorithm
    """

    members: tuple[int, ...]
    slices: tuple[slice, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    length: int
    wire: np.dtype
    result: np.dtype
    algorithm: Algorithm


class Plan(NamedTuple):
    """How a list of arrays of given dtypes and shapes is reduced."""

    operation: Operation
    buckets: tuple[Bucket, ...]


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
    buckets = []

    def close(dtype: np.dtype, members: Sequence[int]) -> None:
        wire = dtypes.accumulator(dtype, op)
        lengths = [math.prod(key[i][1]) for i in members]
        ends = np.cumsum(lengths).tolist()
        chosen = choose(topology, ends[-1] * wire.itemsize, wire, Device("cpu"), algorithm)
        buckets.append(
            Bucket(
                tuple(members),
                tuple(slice(end - n, end) for end, n in zip(ends, lengths, strict=True)),
                tuple(None if len(key[i][1]) == 1 else key[i][1] for i in members),
                ends[-1],
                wire,
                dtypes.result(dtype, op),
                chosen,
            )
        )

    for i in reversed(range(len(key))):
        dtype, shape = key[i]
        dtypes.accumulator(dtype, op)  # raises where it must before anything is sent
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes >= ALONE_BYTES:
            close(dtype, [i])
        elif nbytes:
            group = groups.setdefault(dtype, [])
            group.append(i)
            if bytes_per_pack and sum(math.prod(key[j][1]) for j in group) * dtype.itemsize > bytes_per_pack:
                close(dtype, groups.pop(dtype))
    for dtype, members in groups.items():
        close(dtype, members)
    return Plan(Operation("all_reduce", op.name, key, bytes_per_pack or None, algorithm), tuple(buckets))


def reduce_bucket(
    topology: Topology, op: ReduceOp, bucket: Bucket, arrays: Sequence[np.ndarray], out: list[np.ndarray]
) -> None:
    """Reduce one bucket of ``arrays`` and put the results into their places in ``out``."""
    if len(bucket.members) == 1:
        (i,) = bucket.members
        out[i] = _reduce_one(topology, op, bucket, arrays[i])
        return
    packed = np.empty(bucket.length, bucket.wire)
    np.concatenate([arrays[i] for i in bucket.members], axis=None, out=packed, casting="same_kind")
    bucket.algorithm.sum(topology, packed, packed)
    packed = _finish(topology, op, packed, bucket.result)
    for i, where, shape in zip(bucket.members, bucket.slices, bucket.shapes, strict=True):
        out[i] = packed[where] if shape is None else packed[where].reshape(shape)


def _reduce_one(topology: Topology, op: ReduceOp, bucket: Bucket, array: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype != bucket.wire:
        total = np.empty(bucket.length, bucket.result)
        for start in range(0, bucket.length, HALF_CHUNK):
            piece = slice(start, start + HALF_CHUNK)
            wide = flat[piece].astype(bucket.wire)
            bucket.algorithm.sum(topology, wide, wide)
            total[piece] = _finish(topology, op, wide, bucket.result)
    else:
        total = np.empty(bucket.length, bucket.wire)
        bucket.algorithm.sum(topology, flat, total)
        total = _finish(topology, op, total, bucket.result)
    return total.reshape(array.shape)


def _finish(topology: Topology, op: ReduceOp, total: np.ndarray, result: np.dtype) -> np.ndarray:
    """Divide for a mean, in place where the dtype allows, and round to the dtype of the result."""
    if op is ReduceOp.MEAN and topology.size > 1:
        if total.dtype.kind in "iu":
            return total / topology.size
        total /= total.dtype.type(topology.size)
    return total.astype(result, copy=False)
