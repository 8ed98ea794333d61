"""The all-reduce of buffers in place: without packing, and inside a node without copies."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.collectives.algorithms.choose import IN_PLACE, Choice
from mpistrat.collectives.arenas import arena
from mpistrat.collectives.arenas.arena import Arena, ArenaSpan
from mpistrat.collectives.arithmetic.fixed_tree import combine_rows
from mpistrat.collectives.arithmetic.operations import Op, finish
from mpistrat.collectives.on_host import HostRoute, packed_for_host, reduce_one, short_steps_of
from mpistrat.collectives.packing import Message
from mpistrat.collectives.reduction import FastPath, Reduction, Steps
from mpistrat.collectives.segmented_ring import InMemory, segmented_ring_all_reduce
from mpistrat.runtime.agreement.operation import Operation
from mpistrat.runtime.topology import Topology

_BLOCK_BYTES = 128 << 10  # stays in the cache between a sum and its copies


class ReducedStretch(NamedTuple):
    """A stretch of an arena, which is one message, and the way of its reduction."""

    stretch: ArenaSpan
    message: Message
    route: HostRoute


class OwnSlice(NamedTuple):
    """Elements that this rank combines, in the buffers of all ranks of the node and in its own."""

    rows: list[np.ndarray]
    own: np.ndarray
    others: list[np.ndarray]


def reduction_in_place(
    topology: Topology,
    choice: Choice,
    op: Op,
    home: Arena,
    values: Sequence[np.ndarray],
    algorithm: str | None,
    form: Hashable,
) -> Reduction:
    """Prepare the all-reduce of some buffers of one arena. It is valid for these objects only.

    Buffers that cannot be combined in shared memory go through copies, after the others. The ranks compare ``form``.
    Raise ValueError if two buffers overlap.
    """
    parts = [_part(topology, choice, op, home, each, algorithm) for each in arena.stretches(home, values)]
    stay = _InSharedMemory(topology, home, [part for part in parts if _stays(home, part)])
    go = _ThroughCopies(topology, home, [part for part in parts if not _stays(home, part)])
    where = tuple((each.offset, each.length, each.dtype.str) for each, _, _ in (*stay.parts, *go.parts))
    places = arena.places(home, values), where, len(stay.parts)
    operation = Operation("all_reduce", op.name, "of buffers", home.number, form, *places, algorithm)

    def drop_views(_: object) -> None:  # they would keep the memory alive
        stay.views.clear()
        go.views.clear()

    def pack_values(values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        stay.make_views()
        go.make_views()
        return values

    def combine(values: Any, timeout_seconds: float | None) -> Any:
        if stay.parts:
            stay.reduce()
            topology.lock.is_shared_memory_only = go.is_shared_memory_only
        go.reduce()
        return values

    short = stay.short_steps() if not go.parts else go.short_steps() if not stay.parts else None
    steps = Steps(pack_values, combine, list, meets=bool(stay.parts) or go.is_shared_memory_only)
    buffers = tuple(weakref.ref(value, drop_views) for value in values)
    return Reduction(topology, operation, steps, short, buffers)


def _part(
    topology: Topology, choice: Choice, op: Op, home: Arena, stretch: ArenaSpan, algorithm: str | None
) -> ReducedStretch:
    """Return the part of a stretch: as for any array, unless the reduction in place is predicted to be faster."""
    key = ((stretch.dtype, (stretch.length,)),)
    (message,) = packed_for_host(topology, choice, op, key, 0, algorithm)
    route = HostRoute.of(choice, message, algorithm)
    nbytes = stretch.length * message.wire.itemsize
    predicts = algorithm is None and home.shared and not choice.measured and topology.size > 1
    if predicts and choice.in_place_is_faster(nbytes, route.algorithm):
        route = HostRoute.of(choice, message, IN_PLACE)
    return ReducedStretch(stretch, message, route)


def _stays(home: Arena, part: ReducedStretch) -> bool:
    """Return whether a part is reduced in place: not if its values are widened or another algorithm is faster."""
    return home.shared and part.route.algorithm.in_place and part.message.wire is part.message.source


class _InSharedMemory:
    """The parts of which each rank combines a slice, in the buffers of its node, then on the rail of its local rank."""

    def __init__(self, topology: Topology, home: Arena, parts: Sequence[ReducedStretch]):
        self._topology, self._home, self.parts = topology, home, parts
        self.views: list[tuple[Message, list[OwnSlice]]] = []

    def make_views(self) -> None:
        """Cut this rank's slices into blocks, at the first use."""
        topology = self._topology
        if not self.views:
            for stretch, message, _ in self.parts:
                rows = arena.rows(self._home, stretch, topology.node.size)
                self.views.append((message, _slice(topology, rows)))

    def short_steps(self) -> FastPath | None:
        topology = self._topology
        if len(topology.nodes) > 1 or topology.memory is None:
            return None

        meet = topology.memory.barrier_with_token

        def exchange(values: Sequence[np.ndarray], word: int) -> list[np.ndarray] | None:
            if not self.views:
                self.make_views()
            if not meet(word):
                return None
            topology.lock.ignoring_float_errors(self._combine_on_node)
            return list(values)

        return FastPath(exchange, meet)

    def reduce(self) -> None:
        topology = self._topology
        topology.lock.meet()
        if len(topology.nodes) == 1:
            self._combine_on_node()
        else:
            for message, blocks in self.views:
                for block in blocks:
                    _combine_between_nodes(topology, message, block)
        topology.lock.meet()

    def _combine_on_node(self) -> None:
        for message, blocks in self.views:
            for rows, own, others in blocks:
                combine_rows(message.combine, rows, own)
                finish(own, message.divisor, own)
                for other in others:
                    other[...] = own


def _slice(topology: Topology, rows: list[np.ndarray]) -> list[OwnSlice]:
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
        blocks.append(OwnSlice(parts, parts[rank], parts[:rank] + parts[rank + 1 :]))
    return blocks


def _combine_between_nodes(topology: Topology, message: Message, slices: OwnSlice) -> None:
    rows, own, others = slices

    def gather(where: slice) -> None:
        combine_rows(message.combine, [row[where] for row in rows], own[where])

    def divide(where: slice) -> None:
        finish(own[where], message.divisor, own[where])

    def spread(where: slice) -> None:
        for other in others:
            other[where] = own[where]

    hooks = InMemory(gather, divide, spread)
    segmented_ring_all_reduce(topology.rail, message.combine, own, topology.limits.segment_bytes, hooks)


class _ThroughCopies:
    """The parts that are reduced as any other array, after which the result is copied back."""

    def __init__(self, topology: Topology, home: Arena, parts: Sequence[ReducedStretch]):
        self._topology, self._home, self.parts = topology, home, parts
        self.views: list[np.ndarray] = []
        self.is_shared_memory_only = bool(parts) and all(part.route.algorithm.meets for part in parts)

    def make_views(self) -> None:
        """Make the views of this rank's elements of each part, at the first use."""
        if not self.views:
            home, node = self._home, self._topology.node
            rank, ranks = (node.rank, node.size) if home.shared else (0, 1)
            self.views += [arena.rows(home, part.stretch, ranks)[rank] for part in self.parts]

    def short_steps(self) -> FastPath | None:
        if len(self.parts) != 1:
            return None
        ((_, message, route),) = self.parts
        steps = short_steps_of(self._topology, message, route)
        if steps is None:
            return None
        exchange_own = steps.exchange

        def exchange(values: Sequence[np.ndarray], word: int) -> list[np.ndarray] | None:
            self.make_views()
            totals = exchange_own(self.views, word)
            if totals is None:
                return None
            self.views[0][...] = totals[0]
            return list(values)

        return FastPath(exchange)

    def reduce(self) -> None:
        for mine, (_, message, route) in zip(self.views, self.parts, strict=True):
            mine[...] = reduce_one(self._topology, message, route, mine)
