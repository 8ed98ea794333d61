"""The ops of a strategy whose ranks play several replicas each, or not that of their own number."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.collectives import structures
from mpistrat.collectives.algorithms.tree import Shares
from mpistrat.collectives.arithmetic.operations import Op
from mpistrat.collectives.movement import any_library
from mpistrat.collectives.ops.base import IN_PAIRS, CrossDeviceOps
from mpistrat.collectives.options import CommunicationOptions
from mpistrat.collectives.replica_sums import ReplicaSums
from mpistrat.collectives.sparse import all_reduce_slices
from mpistrat.process.cache import Cache
from mpistrat.runtime.agreement.operation import Operation
from mpistrat.runtime.topology import Topology
from mpistrat.values import DistributedValues, IndexedSlices, component

_MOST = 64  # reductions that are kept, with their buffers


class ReplicasAllReduce(CrossDeviceOps):
    """Cross-device ops for replicas of which a rank plays several: ``blocks`` are those of each rank.

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

    @property
    def topology(self) -> Topology:
        return self._ranks

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

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        return any_library.broadcasted(self._ranks, components_of(tensor, 1)[0])

    def all_reduce(self, op: Op, values: list[Any], options: CommunicationOptions, form: Hashable = None) -> list[Any]:
        total = GrowingTotal(self, op, options, form)
        with structures.refusals("all_reduce", self._ranks, options.timeout_seconds):
            for leaves in zip(*(components_of(value, len(self.local)) for value in values), strict=True):
                total.give([*leaves])
        return total.result()

    def sums(self, op: Op, key: tuple[Any, ...], options: CommunicationOptions, form: Hashable) -> ReplicaSums:
        """Return the prepared all-reduce of arrays of these dtypes and shapes."""
        named = (op, key, options.algorithm, options.bytes_per_pack, form)
        found = self._prepared.get(named)
        if found is None:
            how = options.algorithm, options.bytes_per_pack
            found = self._prepared.keep(named, ReplicaSums(self._ranks, self.shares, op, key, *how, form))
        return found

    def gathered(self, value: Any, axis: int, timeout_seconds: float | None = None) -> Any:
        """Return the values of all replicas along an axis; ``value`` has those of this rank's, in order. Collective."""
        topology = self._ranks
        found = any_library.gathered(topology, value, axis, timeout_seconds)
        order = sorted(range(topology.size), key=lambda rank: self._blocks[rank].start)
        if order == [*range(topology.size)]:
            return found
        ends = itertools.accumulate(topology.all_gather_object(arrays.to_host(value).shape[axis]))
        parts = np.split(arrays.to_host(found), [*ends][:-1], axis)
        return arrays.from_host(np.concatenate([parts[rank] for rank in order], axis), found)


class GrowingTotal:
    """An all-reduce to which the replicas of this rank give values one by one. The ranks compare ``form``."""

    def __init__(self, ops: ReplicasAllReduce, op: Op, options: CommunicationOptions, form: Hashable):
        self._ops, self._op, self._options, self._form = ops, op, options, form
        self._given = 0
        self._likes: list[Any] = []
        self._kinds: list[Any] = []
        self._rows: dict[int, list[tuple[np.ndarray, ...]]] = {}
        self._sums: ReplicaSums | None = None

    def give(self, leaves: Sequence[Any]) -> None:
        """Copy or add the plain values of the next replica. Does not communicate.

        Raise TypeError if a value cannot be reduced, and ValueError if kinds, dtypes or shapes differ from the first
        replica's.
        """
        kinds = [leaf.dense_shape if isinstance(leaf, IndexedSlices) else "dense" for leaf in leaves]
        hosts = [arrays.to_host(leaf) for leaf, kind in zip(leaves, kinds, strict=True) if kind == "dense"]
        key = tuple((host.dtype, host.shape) for host in hosts)
        if self._sums is None:
            self._likes, self._kinds = [*leaves], kinds
            self._rows = {i: [] for i, kind in enumerate(kinds) if kind != "dense"}
            self._sums = self._ops.sums(self._op, key, self._options, self._form)
            self._sums.begin()
        elif kinds != self._kinds or key != self._sums.key:
            own, first = self._ops.local[self._given], self._ops.local[0]
            raise ValueError(
                f"replica {own} calls {Operation('all_reduce', key)}, and replica {first} "
                f"{Operation('all_reduce', self._sums.key)}: kinds, dtypes and shapes must be equal on all replicas"
            )
        self._sums.give(self._ops.local[self._given], hosts)
        for i, rows in self._rows.items():
            rows.append(tuple(arrays.to_host(each).copy() for each in (leaves[i].values, leaves[i].indices)))
        self._given += 1

    def give_arrays(self, given: Sequence[np.ndarray]) -> None:
        """Do as `give` for the NumPy arrays of a replica other than the first, in a third of the time."""
        sums = self._sums
        if sums is None or self._rows or sums.key != tuple([(array.dtype, array.shape) for array in given]):
            self.give(given)
        else:
            sums.give(self._ops.local[self._given], given)
            self._given += 1

    def result(self) -> list[Any]:
        """Return the reductions, as arrays of the first replica's libraries. Collective."""
        ops, out, seconds = self._ops, [*self._likes], self._options.timeout_seconds
        if self._sums is None or self._rows:
            parts = self._op.name, self._form, len(out), tuple(self._rows)
            structures.agree(ops.topology, "all_reduce", *parts, timeout_seconds=seconds)
        if self._sums is not None and self._sums.key:
            totals = iter(self._sums.total(seconds))
            out = [each if i in self._rows else arrays.from_host(next(totals), each) for i, each in enumerate(out)]
        for i, given in self._rows.items():
            values, indices = (np.concatenate(each) for each in zip(*given, strict=True))
            mine = IndexedSlices(values, indices, out[i].dense_shape)
            size = len(ops.shares.tree)
            out[i] = all_reduce_slices(ops.topology, self._op, mine, seconds, ops.gathered, size)
        return out


def components_of(value: Any, count: int) -> Sequence[Any]:
    """Return the values of this rank's ``count`` replicas: a plain value counts for each of them."""
    if isinstance(value, DistributedValues) and len(value.values) == count:
        return value.values
    return [component(value)] * count
