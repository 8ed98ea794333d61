"""The ops of a strategy whose ranks play several replicas each, or a replica of another number than their own.

The replicas of a rank add their values one after another. A value is copied or added at once, so that the next replica
may write to the same memory. Partial sums follow the fixed tree, so that at most ``2 log2(count) + 1``
flat buffers of a dtype are in use for ``count`` replicas.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.collectives import structures
from mpistrat.collectives.algorithms.choose import Choice
from mpistrat.collectives.algorithms.exact import exact_sum_over_ranks, settle_extremes
from mpistrat.collectives.algorithms.tree import Shares, reduce_by_tree, tree_of_right
from mpistrat.collectives.operations import Op, accumulator, finish, result_dtype
from mpistrat.collectives.ops.base import IN_PAIRS, CrossDeviceOps
from mpistrat.collectives.options import CommunicationOptions
from mpistrat.collectives.reduction import (
    HostRoute,
    Key,
    Message,
    Steps,
    as_they_are,
    message_of,
    new_array,
    new_reduction,
    reduce_one,
    unpack_message,
)
from mpistrat.process.cache import Cache
from mpistrat.runtime.agreement.operation import Operation
from mpistrat.runtime.topology import Topology
from mpistrat.values import DistributedValues, IndexedSlices, component

TREE, EXACT, ORDERED = "tree", "exact", "ordered"
_MOST = 64  # reductions that are kept, with their buffers


class _PartialSums:
    """The partial sums of one message. Unless it ``adds``, it keeps the values of each replica."""

    def __init__(self, message: Message, trees: Sequence[range], adds: bool):
        self.message, self.adds = message, adds
        # A dtype costs 0.4 us for each array.
        self._cast = {} if message.wire == message.source else {"dtype": message.wire}
        self._tree_of_right = tree_of_right(trees)
        self._free: list[tuple[np.ndarray, list[np.ndarray]]] = []
        self._parts: list[tuple[range, tuple[np.ndarray, list[np.ndarray]]]] = []

    def clear(self) -> None:
        self._free += [buffer for _, buffer in self._parts]
        self._parts = []

    def add(self, replica: int, values: Sequence[np.ndarray]) -> None:
        """Copy or add the arrays of the next replica."""
        message, tree = self.message, range(replica, replica + 1)
        members = [values[i] for i in message.members]
        above = self._tree_of_right.get(tree) if self.adds else None
        if above is None:
            buffer = self._free.pop() if self._free else self._buffer()
            for view, array in zip(buffer[1], members, strict=True):
                view[...] = array
            self._parts.append((tree, buffer))
            return
        _, left = self._parts.pop()
        for view, array in zip(left[1], members, strict=True):
            message.combine(view, array, out=view, **self._cast)
        while above in self._tree_of_right:
            _, lower = self._parts.pop()
            # The left sum stays where it is; the buffer of the right one is free for the next replica.
            message.combine(lower[0], left[0], out=lower[0])
            self._free.append(left)
            above, left = self._tree_of_right[above], lower
        self._parts.append((above, left))

    def _buffer(self) -> tuple[np.ndarray, list[np.ndarray]]:
        flat = np.empty(self.message.length, self.message.wire)
        views: list[np.ndarray] = []
        for span, length, shape in self.message.runs:
            rows = flat[span].reshape(length, *shape)
            views += [rows[i, ...] for i in range(length)]
        return flat, views

    @property
    def parts(self) -> list[np.ndarray]:
        return [flat for _, (flat, _) in self._parts]


class ReplicaSums:
    """A prepared all-reduce of arrays of these dtypes and shapes, over replicas of which a rank plays several.

    It runs a `Reduction` of the partial sums of this rank. The algorithms "tree" and "exact" have the same bits on any
    number of ranks. Raise TypeError if ``op`` cannot reduce an array, and ValueError for "ordered", which adds in the
    order of ranks.
    """

    def __init__(
        self,
        topology: Topology,
        shares: Shares,
        op: Op,
        key: Key,
        algorithm: str | None,
        bytes_per_pack: int,
        form: Hashable,
    ):
        if algorithm == ORDERED:
            raise ValueError(
                'implementation="ordered" adds values in the order of ranks, and a rank plays several replicas: use '
                '"tree" or "exact"'
            )
        self._shares, self.key = shares, key
        groups: dict[np.dtype, list[int]] = {}
        for i, (dtype, shape) in enumerate(key):
            accumulator(dtype, op)
            if math.prod(shape):
                groups.setdefault(dtype, []).append(i)
        size, trees = len(shares.tree), shares.of_rank[topology.rank]
        self._partial_sums: list[_PartialSums] = []
        for members in groups.values():
            message = message_of(op, key, members, size)
            # A partial sum is rounded, so an exact sum needs the values themselves: a buffer for each replica. Extremes
            # and products are combined as they come, also by "exact".
            is_exact = algorithm == EXACT and message.wire.kind in "fc"
            self._partial_sums.append(_PartialSums(message, trees, adds=not is_exact or message.combine is not np.add))
        empty = [(i, shape, result_dtype(dtype, op)) for i, (dtype, shape) in enumerate(key) if not math.prod(shape)]
        self._reduction = new_reduction(
            topology,
            Operation("all_reduce", op.name, key, form, f"of {size} replicas", bytes_per_pack or None, algorithm),
            Steps(
                as_they_are,
                # Without this object: a cycle would keep the buffers of gradients until Python looks for cycles.
                partial(_totals, topology, shares, algorithm, self._partial_sums),
                partial(_unpacked, self._partial_sums, empty, len(key)),
                meets=algorithm == TREE and topology.memory is not None and bool(groups),
            ),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaSums:
        return self  # as a `Reduction`; copies of views would not be views of the copy

    def begin(self) -> None:
        for sums in self._partial_sums:
            sums.clear()
        self._sample = self._reduction.sample(self._shares)

    def add(self, replica: int, values: Sequence[np.ndarray]) -> None:
        """Add the arrays of this rank's next replica. Does not communicate."""
        if self._sample is not None:
            self._sample.take(values)
        with np.errstate(all="ignore"):
            for sums in self._partial_sums:
                sums.add(replica, values)

    def total(self, timeout_seconds: float | None) -> Any:
        """Return the reductions of all replicas' arrays. Collective."""
        return self._reduction.run([part for sums in self._partial_sums for part in sums.parts], timeout_seconds)


def _totals(
    topology: Topology,
    shares: Shares,
    algorithm: str | None,
    partial_sums: Sequence[_PartialSums],
    parts: Sequence[np.ndarray],
    timeout_seconds: float | None,
) -> list[np.ndarray]:
    return [_total(topology, shares, algorithm, sums) for sums in partial_sums]


def _total(topology: Topology, shares: Shares, algorithm: str | None, sums: _PartialSums) -> np.ndarray:
    message, parts = sums.message, sums.parts
    if algorithm != TREE and sums.adds:
        folded = parts[0]
        for part in parts[1:]:
            message.combine(folded, part, out=folded)
        route = HostRoute.of(Choice.of(topology), message, algorithm)
        total = reduce_one(topology, message, route, folded)
        if algorithm == EXACT and message.wire.kind == "f":
            settle_extremes(total)
        return total
    wide = new_array(message.length, message.wire)
    if sums.adds:
        reduce_by_tree(topology, shares, message.combine, parts, wide)
    else:
        exact_sum_over_ranks(topology, np.stack(parts), wide, len(shares.tree))
    total = wide if message.wire is message.result else new_array(message.length, message.result)
    finish(wide, message.divisor, total)
    return total


def _unpacked(
    partial_sums: Sequence[_PartialSums],
    empty: Sequence[tuple[int, tuple[int, ...], np.dtype]],
    count: int,
    totals: Sequence[np.ndarray],
) -> list[np.ndarray]:
    out = [np.empty(0)] * count
    for sums, total in zip(partial_sums, totals, strict=True):
        unpack_message(sums.message, total, out)
    for i, shape, dtype in empty:
        out[i] = np.empty(shape, dtype)
    return out


class ReplicasAllReduce(CrossDeviceOps):
    """Cross-device ops for replicas of which a rank plays several: ``blocks`` are the replicas of each rank.

    A value is a `PerReplica` of this rank's replicas, or a plain value, which counts for each of them.
    """

    def __init__(self, blocks: Sequence[range]):
        super().__init__()
        self._blocks = blocks
        self._prepared = Cache[Hashable, ReplicaSums](_MOST)

    def _rebound_to(self, topology: Topology) -> CrossDeviceOps:
        self.shares = Shares(topology, self._blocks)
        self.local = self._blocks[topology.rank]
        return super()._rebound_to(topology)

    def joins_arrays(self, options: CommunicationOptions) -> bool:
        return True

    def reduce_implementation(
        self, reduce_op: Op, per_replica_value: DistributedValues, destinations: Any, options: Any
    ) -> Any:
        return self.all_reduce(reduce_op, [per_replica_value], options)[0]

    def batch_reduce_implementation(
        self, reduce_op: Op, value_destination_pairs: Sequence[tuple[DistributedValues, Any]], options: Any
    ) -> Sequence[Any]:
        return self.all_reduce(reduce_op, [value for value, _ in value_destination_pairs], options, IN_PAIRS)

    def all_reduce(self, op: Op, values: list[Any], options: CommunicationOptions, form: Hashable = None) -> list[Any]:
        total = IncrementalAllReduce(self, op, options, form)
        with structures.refusals("all_reduce", self._ranks, options.timeout_seconds):
            for leaves in zip(*(components_of(value, len(self.local)) for value in values), strict=True):
                total.add(leaves)
        return total.result()

    def sums(self, op: Op, key: tuple[Any, ...], options: CommunicationOptions, form: Hashable) -> ReplicaSums:
        """Return the prepared all-reduce of arrays of these dtypes and shapes."""
        named = (op, key, options.algorithm, options.bytes_per_pack, form)
        known = self._prepared.get(named)
        return known or self._prepared.keep(named, ReplicaSums(self._ranks, self.shares, *named))

    def _number_of_replicas(self) -> int:
        return len(self.shares.tree)

    def gathered(self, value: Any, axis: int, timeout_seconds: float | None = None, root: int | None = None) -> Any:
        topology, total = self._ranks, super().gathered(value, axis, timeout_seconds, root)
        order = sorted(range(topology.size), key=lambda rank: self._blocks[rank].start)
        if order == [*range(topology.size)]:
            return total
        ends = itertools.accumulate(topology.all_gather_object(arrays.to_host(value).shape[axis]))
        if total is None:
            return None
        parts = np.split(arrays.to_host(total), [*ends][:-1], axis)
        return arrays.from_host(np.concatenate([parts[rank] for rank in order], axis, dtype=parts[0].dtype), total)


_ONLY_ARRAYS = {np.ndarray}


class IncrementalAllReduce:
    """An all-reduce to which the replicas of this rank add values one by one. The ranks compare ``form``.

    ``ops`` are those of an engine whose ranks play several replicas.
    """

    def __init__(self, ops: CrossDeviceOps, op: Op, options: CommunicationOptions, form: Hashable):
        assert isinstance(ops, ReplicasAllReduce)
        self._ops, self._op, self._options, self._form = ops, op, options, form
        self._replicas = iter(ops.local)
        self._likes: Sequence[Any] = ()
        self._kinds: list[Any] = []
        self._rows: dict[int, list[tuple[np.ndarray, ...]]] = {}
        self._sums: ReplicaSums | None = None

    def add(self, leaves: Sequence[Any]) -> None:
        """Copy or add the plain values of the next replica. Does not communicate.

        Raise TypeError if a value cannot be reduced, and ValueError if kinds, dtypes or shapes differ between replicas.
        """
        replica, hosts = next(self._replicas), leaves
        kinds: list[Any] = ["dense"] * len(leaves)
        if {*map(type, leaves)} != _ONLY_ARRAYS:  # NumPy arrays alone take a third of the time
            kinds = [leaf.dense_shape if isinstance(leaf, IndexedSlices) else "dense" for leaf in leaves]
            hosts = [arrays.to_host(leaf) for leaf, kind in zip(leaves, kinds, strict=True) if kind == "dense"]
        key = tuple([(host.dtype, host.shape) for host in hosts])
        if self._sums is None:
            self._likes, self._kinds = leaves, kinds
            self._rows = {i: [] for i, kind in enumerate(kinds) if kind != "dense"}
            self._sums = self._ops.sums(self._op, key, self._options, self._form)
            self._sums.begin()
        elif kinds != self._kinds or key != self._sums.key:
            raise ValueError(
                f"replica {replica} calls {Operation('all_reduce', key)}, and replica {self._ops.local[0]} "
                f"{Operation('all_reduce', self._sums.key)}: kinds, dtypes and shapes must be equal on all replicas"
            )
        self._sums.add(replica, hosts)
        for i, rows in self._rows.items():
            rows.append(tuple(arrays.to_host(array).copy() for array in (leaves[i].values, leaves[i].indices)))

    def result(self) -> list[Any]:
        """Return the reductions, as arrays of the first replica's libraries. Collective."""
        ops, out, seconds = self._ops, [*self._likes], self._options.timeout_seconds
        if self._sums is None or self._rows:
            parts = self._op.name, self._form, len(out), tuple(self._rows)
            structures.agree(ops._ranks, "all_reduce", *parts, timeout_seconds=seconds)
        if self._sums is not None and self._sums.key:
            totals = iter(self._sums.total(seconds))
            out = [like if i in self._rows else arrays.from_host(next(totals), like) for i, like in enumerate(out)]
        for i, rows in self._rows.items():
            values, indices = (np.concatenate(pieces, dtype=pieces[0].dtype) for pieces in zip(*rows, strict=True))
            out[i] = ops.all_reduce_rows(self._op, IndexedSlices(values, indices, out[i].dense_shape), seconds)
        return out


def components_of(value: Any, count: int) -> Sequence[Any]:
    """Return the values of this rank's ``count`` replicas: a plain value counts for each of them."""
    if isinstance(value, DistributedValues) and len(value.values) == count:
        return value.values
    return [component(value)] * count
