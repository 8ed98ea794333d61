"""The all-reduce of buffers in place: without packing, and inside a node without copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from operator import is_
from typing import NamedTuple

import numpy as np

from mpistrat.collectives import packing, small_all_reduce
from mpistrat.collectives.algorithms.costs import Measured
from mpistrat.collectives.algorithms.hierarchical import HierarchicalAllReduce
from mpistrat.collectives.arenas import arena
from mpistrat.collectives.arenas.arena import Arena, Stretch
from mpistrat.collectives.combine_rows import combine_rows
from mpistrat.collectives.division import divide
from mpistrat.collectives.operations import Op
from mpistrat.collectives.rings.segmented import InMemory, segmented_ring_all_reduce
from mpistrat.runtime.agreement.operation import Operation
from mpistrat.runtime.topology import Topology

_target = weakref.ref.__call__
_IN_PLACE = HierarchicalAllReduce()
_BLOCK_BYTES = 128 << 10  # stays in the cache between a sum and its copies


class Block(NamedTuple):
    """Elements that this rank combines, in the buffers of all ranks of the node and in its own."""

    rows: list[np.ndarray]
    own: np.ndarray
    others: list[np.ndarray]


class InPlace(NamedTuple):
    """The plan of the all-reduce of some buffers of an arena.

    Attributes
    ----------
    buffers : tuple of weakref.ref
        The arrays; the plan is valid for these objects only.
    home : Arena
    operation : Operation
    stretches : tuple of Stretch
    buckets : tuple of Bucket
        How each stretch is reduced where the ranks do not share memory.
    slices : list of list of Block
        This rank's slice of each stretch, on one node cut into blocks. Made at the first use. Emptied when a buffer
        is deleted, since views would keep the memory alive.
    short : callable or None
        The prepared all-reduce, for one node, and for one small stretch between nodes.
    then : InPlace or None
        The plan of the buffers that cannot be reduced in place.
    """

    buffers: tuple[weakref.ref[np.ndarray], ...]
    home: Arena
    operation: Operation
    stretches: tuple[Stretch, ...]
    buckets: tuple[packing.Bucket, ...]
    slices: list[list[Block]]
    short: Callable[[], None] | None
    then: InPlace | None

    def is_for(self, values: Sequence[np.ndarray]) -> bool:
        """Return whether the plan was made for these objects."""
        return len(values) == len(self.buffers) and all(map(is_, map(_target, self.buffers), values))


def plan(
    topology: Topology,
    op: Op,
    home: Arena,
    values: Sequence[np.ndarray],
    algorithm: str | None,
    form: Hashable,
) -> InPlace:
    """Return the plan of some buffers of one arena, the leaves of a structure of form ``form``."""
    found = arena.stretches(home, values)
    buckets = [_bucket(topology, op, home, stretch, algorithm) for stretch in found]
    stay: list[tuple[Stretch, packing.Bucket]] = []
    go: list[tuple[Stretch, packing.Bucket]] = []
    for stretch, bucket in zip(found, buckets, strict=True):
        (stay if _stays(home, bucket) else go).append((stretch, bucket))
    then = None
    if stay and go:
        then = _part(topology, op, home, values, algorithm, form, go, None)
    return _part(topology, op, home, values, algorithm, form, stay or go, then)


def _part(
    topology: Topology,
    op: Op,
    home: Arena,
    values: Sequence[np.ndarray],
    algorithm: str | None,
    form: Hashable,
    part: Sequence[tuple[Stretch, packing.Bucket]],
    then: InPlace | None,
) -> InPlace:
    found, buckets = tuple(stretch for stretch, _ in part), tuple(bucket for _, bucket in part)
    where = tuple((each.offset, each.length, each.dtype.str) for each in found)
    places = arena.places(home, values)
    operation = Operation("all_reduce", op.name, "of buffers", home.number, form, places, where, algorithm)
    slices: list[list[Block]] = []
    buffers = tuple(weakref.ref(value, lambda _: slices.clear()) for value in values)
    made = InPlace(buffers, home, operation, found, buckets, slices, None, then)
    if len(topology.nodes) == 1 and _all_stay(made) and not topology.compares_places:
        return made._replace(short=_short(topology, made))
    through_slots = packing.Plan(operation, buckets, (), True)
    if len(topology.nodes) > 1 and small_all_reduce.supports(topology, through_slots):
        return made._replace(short=_short_through_slots(topology, made, through_slots))
    return made


def _bucket(
    topology: Topology, op: Op, home: Arena, stretch: Stretch, algorithm: str | None
) -> packing.Bucket:
    """Return the bucket of a stretch: as for any array, unless the reduction in place is predicted to be faster."""
    key = ((stretch.dtype, (stretch.length,)),)
    (bucket,) = packing.plan(topology, op, key, 0, algorithm).buckets
    if algorithm is None and home.shared and not topology.slot(Measured).points and topology.size > 1:
        nbytes = stretch.length * bucket.wire.itemsize
        if _IN_PLACE.cost_in_place(topology, nbytes) < bucket.algorithm.cost(topology, nbytes):
            (bucket,) = packing.plan(topology, op, key, 0, _IN_PLACE.name).buckets
    return bucket


def reduce(topology: Topology, plan: InPlace, timeout_seconds: float | None) -> None:
    """Write the reduction over all ranks to the buffers of each rank."""
    if plan.short is not None and timeout_seconds is None:
        plan.short()
    elif _all_stay(plan):
        with topology.turn(plan.operation, True, timeout_seconds):
            topology.ignoring_float_errors(_reduce_in_shared_memory, topology, plan)
    else:
        meets = bool(plan.buckets) and all(bucket.algorithm.meets for bucket in plan.buckets)
        with topology.turn(plan.operation, meets, timeout_seconds):
            topology.ignoring_float_errors(_reduce_through_copies, topology, plan)
    if plan.then is not None:
        reduce(topology, plan.then, timeout_seconds)


def _all_stay(plan: InPlace) -> bool:
    return plan.home.shared and all(_stays(plan.home, bucket) for bucket in plan.buckets)


def _stays(home: Arena, bucket: packing.Bucket) -> bool:
    """Return whether a bucket is reduced in place: not if its values are widened or another algorithm is faster."""
    return home.shared and bucket.algorithm.name == _IN_PLACE.name and bucket.wire is bucket.source


def _short(topology: Topology, plan: InPlace) -> Callable[[], None]:
    """Prepare `_reduce_in_shared_memory` on one node, with less Python code around the barriers.

    The function takes and releases the collective lock itself.
    """
    memory, operation = topology.memory, plan.operation
    assert memory is not None
    begin, failed, disagree = topology.begin, topology.failed, topology.disagree
    meet_saying, later_word = memory.meet_saying, topology.later_word

    def reduce() -> None:
        word = begin(operation)
        try:
            if not plan.slices:
                _cut(topology, plan)
            # The words that `Topology.meet` passes in its first and second call.
            if not meet_saying(word):
                disagree(operation)
            topology.ignoring_float_errors(_combine_on_node, plan)
            if not meet_saying(later_word(word, 1)):
                disagree(operation)
            topology.taken = False
        except BaseException as error:
            failed(type(error))
            raise

    return reduce


def _short_through_slots(
    topology: Topology, plan: InPlace, through_slots: packing.Plan
) -> Callable[[], None]:
    """Prepare `_reduce_through_copies` of one small stretch. The function takes the collective lock itself."""
    (stretch,) = plan.stretches
    reduce_small = small_all_reduce.prepare(topology, through_slots, ((stretch.length,),))

    def reduce() -> None:
        if not plan.slices:
            own = _own_stretches(topology, plan)[0]
            plan.slices.append([Block([], own, [])])
        own = plan.slices[0][0].own
        own[...] = reduce_small(own)

    return reduce


def _reduce_in_shared_memory(topology: Topology, plan: InPlace) -> None:
    """Reduce in place: each rank of a node combines a slice; slice ``i`` travels on the rail of local rank ``i``."""
    if not plan.slices:
        _cut(topology, plan)
    topology.meet()
    if len(topology.nodes) == 1:
        _combine_on_node(plan)
    else:
        for blocks, bucket in zip(plan.slices, plan.buckets, strict=True):
            for block in blocks:
                _combine_between_nodes(topology, bucket, block)
    topology.meet()


def _combine_on_node(plan: InPlace) -> None:
    for blocks, bucket in zip(plan.slices, plan.buckets, strict=True):
        combine, divisor = bucket.combine, bucket.divisor
        for rows, own, others in blocks:
            if len(rows) == 2:
                combine(*rows, out=own)
            else:
                combine_rows(combine, rows, own)
            if divisor != 1:
                _divide(bucket, own)
            for other in others:
                other[...] = own


def _cut(topology: Topology, plan: InPlace) -> None:
    ranks = topology.node.size
    plan.slices.extend(_slice(topology, arena.rows(plan.home, each, ranks)) for each in plan.stretches)


def _slice(topology: Topology, rows: list[np.ndarray]) -> list[Block]:
    rank, length = topology.node.rank, len(rows[0])
    one_node = len(topology.nodes) == 1
    slices = len(rows) if one_node else min(topology.ranks_per_node)
    if rank >= slices:
        return []
    last = length * (rank + 1) // slices
    step = max(1, _BLOCK_BYTES // rows[0].itemsize if one_node else length)
    blocks = []
    for start in range(length * rank // slices, last, step):
        parts = [row[start : min(start + step, last)] for row in rows]
        blocks.append(Block(parts, parts[rank], parts[:rank] + parts[rank + 1 :]))
    return blocks


def _combine_between_nodes(topology: Topology, bucket: packing.Bucket, slices: Block) -> None:
    rows, own, others = slices

    def gather(where: slice) -> None:
        combine_rows(bucket.combine, [row[where] for row in rows], own[where])

    def finish(where: slice) -> None:
        _divide(bucket, own[where])

    def spread(where: slice) -> None:
        for other in others:
            other[where] = own[where]

    hooks = InMemory(gather, finish, spread)
    segmented_ring_all_reduce(topology.rail, bucket.combine, own, topology.limits.segment_bytes, hooks)


def _divide(bucket: packing.Bucket, total: np.ndarray) -> None:
    if bucket.divisor != 1:
        divide(total, bucket.divisor, total)


def _reduce_through_copies(topology: Topology, plan: InPlace) -> None:
    """Reduce each stretch as any other array, and copy the result back."""
    for own, bucket in zip(_own_stretches(topology, plan), plan.buckets, strict=True):
        own[...] = packing.reduce_one(topology, bucket, own)


def _own_stretches(topology: Topology, plan: InPlace) -> list[np.ndarray]:
    home = plan.home
    rank, ranks = (topology.node.rank, topology.node.size) if home.shared else (0, 1)
    return [arena.rows(home, stretch, ranks)[rank] for stretch in plan.stretches]
