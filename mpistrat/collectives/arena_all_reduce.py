"""The all-reduce of buffers where they are: nothing is packed, and inside a node nothing copied."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import numpy as np

from mpistrat.collectives import arena, packing
from mpistrat.collectives.arena import Arena, Stretch
from mpistrat.collectives.operations import Op
from mpistrat.collectives.ring import ring_all_reduce
from mpistrat.runtime.operation import Operation
from mpistrat.runtime.topology import Topology

_target = weakref.ref.__call__
_BLOCK_BYTES = 128 << 10  # stays in the cache between a sum and its copies


class InPlace(NamedTuple):
    """How some buffers are reduced.

    Attributes
    ----------
    buffers : tuple of weakref.ref
        The arrays themselves: the plan is that of these objects.
    home : Arena
    operation : Operation
    stretches : tuple of Stretch
    by_name : bool
        Whether a user named the algorithm.
    buckets : tuple of Bucket
        How each stretch is reduced where the ranks do not see each other's.
    """

    buffers: tuple[weakref.ref[np.ndarray], ...]
    home: Arena
    operation: Operation
    stretches: tuple[Stretch, ...]
    by_name: bool
    buckets: tuple[packing.Bucket, ...]

    def is_for(self, values: Sequence[np.ndarray]) -> bool:
        """Whether it was made for these objects."""
        return len(values) == len(self.buffers) and all(map(is_, map(_target, self.buffers), values))


def plan(
    topology: Topology, op: Op, home: Arena, values: Sequence[np.ndarray], algorithm: str | None
) -> InPlace:
    """Make the plan of some buffers of one arena."""
    found = arena.stretches(home, values)
    buckets: list[packing.Bucket] = []
    for stretch in found:
        key = ((stretch.dtype, (stretch.length,)),)
        buckets += packing.plan(topology, op, key, 0, algorithm).buckets
    where = tuple((each.offset, each.length, each.dtype.str) for each in found)
    operation = Operation("all_reduce", op.name, "of buffers", home.number, where, algorithm)
    return InPlace(
        tuple(map(weakref.ref, values)),
        home,
        operation,
        found,
        algorithm not in (None, "hierarchical"),
        tuple(buckets),
    )


def reduce(topology: Topology, plan: InPlace, timeout_seconds: float | None) -> None:
    """Leave the reduction over all ranks in the buffers of each."""
    home = plan.home
    with np.errstate(invalid="ignore", over="ignore"):
        if not home.shared or plan.by_name or any(b.wire is not b.source for b in plan.buckets):
            _reduce_through_copies(topology, plan, timeout_seconds)
        else:
            _reduce_in_shared_memory(topology, plan, timeout_seconds)


def _reduce_in_shared_memory(topology: Topology, plan: InPlace, timeout_seconds: float | None) -> None:
    home = plan.home
    with topology.turn(plan.operation, True, timeout_seconds):
        topology.meet()
        for stretch, bucket in zip(plan.stretches, plan.buckets, strict=True):
            _reduce_shared(topology, bucket, arena.rows(home, stretch, topology.node.size))
        topology.meet()


def _reduce_shared(topology: Topology, bucket: packing.Bucket, rows: list[np.ndarray]) -> None:
    """Each rank of the node reduces a slice of all; between nodes slice ``i`` goes by the rail of local rank ``i``."""
    ranks, rank, count = len(rows), topology.node.rank, len(rows[0])
    one_node = len(topology.nodes) == 1
    slices = ranks if one_node else min(topology.ranks_per_node)
    if rank >= slices:
        return
    first, last = count * rank // slices, count * (rank + 1) // slices
    step = max(1, _BLOCK_BYTES // rows[0].itemsize)
    own = rows[rank]
    for start in range(first, last, step):
        block = slice(start, min(start + step, last))
        total = own[block]
        for i, row in enumerate(rows):
            if i != rank:
                bucket.combine(total, row[block], out=total)
        if one_node:
            _spread(bucket, rows, rank, block)
    if not one_node:
        part = own[first:last]
        scratch = np.empty(math.ceil(len(part) / topology.rail.size), part.dtype)
        ring_all_reduce(topology.rail, bucket.combine, part, scratch)
        for start in range(first, last, step):
            _spread(bucket, rows, rank, slice(start, min(start + step, last)))


def _spread(bucket: packing.Bucket, rows: list[np.ndarray], rank: int, block: slice) -> None:
    total = rows[rank][block]
    if bucket.divisor != 1:
        np.divide(total, total.dtype.type(bucket.divisor), out=total)
    for i, row in enumerate(rows):
        if i != rank:
            row[block] = total


def _reduce_through_copies(topology: Topology, plan: InPlace, timeout_seconds: float | None) -> None:
    """Piece by piece as any other array, and back."""
    home = plan.home
    rank = topology.node.rank if home.shared else 0
    ranks = topology.node.size if home.shared else 1
    meets = bool(plan.buckets) and plan.buckets[0].algorithm.meets
    with topology.turn(plan.operation, meets, timeout_seconds):
        for stretch, bucket in zip(plan.stretches, plan.buckets, strict=True):
            own = arena.rows(home, stretch, ranks)[rank]
            own[...] = packing.reduce_one(topology, bucket, own)
