"""The replicas of a strategy whose ranks play several of them: their contexts and cross-replica calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat import context, nest
from mpistrat.arrays import arrays
from mpistrat.collectives import CommunicationOptions, structures
from mpistrat.collectives.asynchronous import made_at_once
from mpistrat.collectives.movement import any_library
from mpistrat.collectives.operations import Op, parse_op
from mpistrat.collectives.ops.of_replicas import IncrementalAllReduce, ReplicasAllReduce, components_of
from mpistrat.engine import Engine
from mpistrat.replicas.meeting import JointCall, ReplicaMeeting
from mpistrat.strategy import replica_context
from mpistrat.strategy.replica_context import apart, components_but_variables, regrouped
from mpistrat.values import DistributedValues, IndexedSlices, ReduceOp, component, reducible, snapshot


class LocalReplicaContext(replica_context.ReplicaContext):
    """The context of one of several replicas of this rank. See `ReplicaContext` for its methods."""

    def __init__(self, strategy: context.AnyStrategy, replica: int, number_here: int, meeting: ReplicaMeeting):
        super().__init__(strategy, replica)
        self.number_here, self.meeting = number_here, meeting
        self.played_here, self._meet = self._engine.replicas.count, meeting.meet

    @property
    def devices(self) -> tuple[str, ...]:
        context.require_replica_context(self)
        names = self._engine.devices
        return (names[self.number_here % len(names)],)

    def meet(self, name: str, begin: Callable[[], JointCall], value: Any) -> Any:
        """Make a cross-replica call together with the other replicas of this rank. See `ReplicaMeeting.meet`."""
        context.require_replica_context(self)
        return self._meet(self.number_here, name, begin, value)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.meet("merge_call", lambda: _Merged(self._strategy, merge_fn), (tuple(args), dict(kwargs or {})))

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        given = parse_op(reduce_op), value, self._engine.merged(options)
        return self.meet("all_reduce", lambda: _Reduced(self._engine.of_replicas), given)

    def experimental_all_reduce_async(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        op, merged = parse_op(reduce_op), self._engine.merged(options)
        replica_context.refuse_async(merged)
        return self.meet("all_reduce_async", lambda: _ReducedAtOnce(self._engine.of_replicas), (op, value, merged))

    def experimental_reduce_scatter(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        op, merged = parse_op(reduce_op), self._engine.merged(options)
        replica_context.refuse_scatter(merged)
        total = self.meet("reduce_scatter", lambda: _Reduced(self._engine.of_replicas, rows=True), (op, value, merged))
        return replica_context.own_rows(total, self._id, self.num_replicas_in_sync)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        given = value, axis, self._engine.merged(options).timeout_seconds
        return self.meet("all_gather", lambda: _Gathered(self._engine.of_replicas), given)


class _Reduced:
    """The all-reduce of replicas in a rank."""

    def __init__(self, ops: ReplicasAllReduce, rows: bool = False):
        self._ops, self._rows = ops, rows
        self._total: IncrementalAllReduce | None = None
        self._called: tuple[Any, ...] = ()
        self._rebuild: list[Callable[[list[Any]], Any]] = []

    def give(self, given: tuple[Op, Any, CommunicationOptions]) -> None:
        op, value, options = given
        leaves, rebuild, form = nest.take_apart(value)
        if nest.holds(leaves, DistributedValues):
            leaves = [reducible(op, leaf) for leaf in leaves]
        if self._rows:
            for leaf in leaves:
                any_library.described_for_scatter(op, leaf)
        called = op, options, form
        if self._total is None:
            self._called, self._total = called, IncrementalAllReduce(self._ops, op, options, form)
        elif called != self._called:
            raise ValueError(
                f"a replica calls all_reduce with {called}, and the first one of its rank with {self._called}: "
                "reductions, options and structures must be equal on all replicas"
            )
        self._total.give(leaves)
        self._rebuild.append(rebuild if leaves else lambda _: value)

    def make(self) -> list[Any]:
        assert self._total is not None
        totals = self._total.result()
        return [rebuild(own_copies(totals, i)) for i, rebuild in enumerate(self._rebuild)]


class _ReducedAtOnce(_Reduced):
    """The asynchronous all-reduce of replicas in a rank, which is made when the last one has come."""

    def give(self, given: tuple[Op, Any, CommunicationOptions]) -> None:
        if nest.holds(nest.flatten(given[1])[0], IndexedSlices):
            raise TypeError(replica_context.NOT_ASYNCHRONOUS)
        super().give(given)

    def make(self) -> list[Any]:
        return [made_at_once(self._ops.topology, total) for total in super().make()]


class _Gathered:
    """The all-gather of replicas in a rank."""

    def __init__(self, ops: ReplicasAllReduce):
        self._ops = ops
        self._given: list[list[np.ndarray]] = []

    def give(self, given: tuple[Any, int, float | None]) -> None:
        value, axis, seconds = given
        leaves, rebuild, form = nest.take_apart(value)
        if nest.holds(leaves, IndexedSlices):
            raise NotImplementedError(replica_context.NOT_GATHERED)
        leaves = [component(leaf) for leaf in leaves]
        called = form, seconds, [any_library.described_for_gather(leaf, axis) for leaf in leaves]
        if not self._given:
            self._called, self._likes, self._rebuild = called, leaves, rebuild
        elif called != self._called:
            raise ValueError(f"a replica gathers {called}, and the first one of its rank {self._called}")
        self._given.append([arrays.to_host(leaf).copy() for leaf in leaves])

    def make(self) -> list[Any]:
        form, seconds, described = self._called
        if form is not None:
            structures.agree(self._ops.topology, "all_gather", form, *described, timeout_seconds=seconds)
        found = []
        for like, (_, axis, _), parts in zip(self._likes, described, zip(*self._given, strict=True), strict=True):
            joined = np.concatenate(parts, axis, dtype=parts[0].dtype)  # else in native order on ranks that join
            whole = arrays.from_host(joined, like)
            found.append(self._ops.gathered(whole, axis, seconds))
        return [self._rebuild(own_copies(found, i)) for i in range(len(self._given))]


class _Merged:
    """The call of a function in cross-replica context, once in a rank."""

    def __init__(self, strategy: context.AnyStrategy, function: Callable[..., Any]):
        self._strategy, self._function = strategy, function
        self._given: list[Any] = []

    def give(self, given: Any) -> None:
        self._given.append(apart(given))

    def make(self) -> list[Any]:
        args, kwargs = regrouped(self._given)
        contexts = self._strategy.extended.replica_contexts
        stack = context.stack()
        depth = len(stack)
        try:
            stack.append(self._strategy.extended.cross_replica_mode)
            result = self._function(self._strategy, *args, **kwargs)
            results = []
            for i, each in enumerate(contexts):
                stack.append(each.mode)
                own = components_but_variables(result)
                results.append(own if i == 0 else apart(own))
                stack.pop()
        finally:
            del stack[depth:]
        return results


def gathered_across(engine: Engine, value: Any, axis: int, seconds: float | None = None) -> Any:
    """Return the values of all replicas along an axis, in cross-replica context. Collective."""
    call = _Gathered(engine.of_replicas)
    with structures.refusals("all_gather", engine.topology, seconds):
        for each in each_of(value, engine.replicas.count):
            call.give((each, axis, seconds))
    return call.make()[0]


def each_of(tree: Any, count: int) -> list[Any]:
    """Return a structure for each replica of this rank, with its components."""
    leaves, rebuild = nest.flatten(tree)
    if not nest.holds(leaves, DistributedValues):
        return [tree] * count
    parts = [components_of(leaf, count) for leaf in leaves]
    return [rebuild([part[i] for part in parts]) for i in range(count)]


def own_copies(values: list[Any], i: int) -> list[Any]:
    """Return the results of a call for replica ``i`` of this rank: copies for all but the first."""
    return values if i == 0 else [*map(snapshot, values)]


def run_each(extended: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """Run a function for each replica of this rank, and return its results by the rule of `regrouped`."""
    contexts = extended.replica_contexts

    def play(i: int) -> Any:
        stack = context.local.stack
        depth = len(stack)
        try:
            stack.append(contexts[i].mode)
            mine = [*map(components_but_variables, args)]
            if not kwargs:
                return fn(*mine)
            return fn(*mine, **{name: components_but_variables(arg) for name, arg in kwargs.items()})
        finally:
            del stack[depth:]

    return regrouped(extended.meeting.run(play), always=extended.wraps)
