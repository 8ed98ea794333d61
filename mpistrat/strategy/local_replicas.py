"""The replicas of a strategy whose ranks play several of them: their contexts and cross-replica calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpistrat import context, nest
from mpistrat.collectives import CommunicationOptions
from mpistrat.collectives.asynchronous import completed_all_reduce
from mpistrat.collectives.movement import any_library
from mpistrat.collectives.operations import Op, parse_op
from mpistrat.collectives.ops.base import CrossDeviceOps
from mpistrat.collectives.ops.of_replicas import IncrementalAllReduce, components_of
from mpistrat.replicas.meeting import JointCall, ReplicaMeeting
from mpistrat.strategy import replica_context
from mpistrat.strategy.replica_context import apart, components_but_variables, own_copies, regrouped
from mpistrat.values import DistributedValues, ReduceOp
from mpistrat.variables import operand


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
        # One name stands for all replicas of a rank that were not given names.
        return (names[self.number_here % len(names)],)

    def meet(self, name: str, begin: Callable[[], JointCall], value: Any) -> Any:
        """Make a cross-replica call together with the other replicas of this rank. See `ReplicaMeeting.meet`."""
        context.require_replica_context(self)
        return self._meet(self.number_here, name, begin, value)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.meet("merge_call", lambda: _MergeCall(self._strategy, merge_fn), (tuple(args), dict(kwargs or {})))

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        return self._reduced("all_reduce", reduce_op, value, self._engine.merged(options))

    def experimental_all_reduce_async(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        merged = self._engine.merged(options)
        replica_context.refuse_async(merged)
        total = self._reduced("all_reduce_async", reduce_op, value, merged, replica_context.refuse_rows)
        return completed_all_reduce(self._engine.topology, total)

    def experimental_reduce_scatter(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        merged = self._engine.merged(options)
        replica_context.refuse_scatter(merged)
        total = self._reduced("reduce_scatter", reduce_op, value, merged, any_library.described_for_scatter)
        return replica_context.own_rows(total, self._id, self.num_replicas_in_sync)

    def _reduced(
        self,
        name: str,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions,
        check: Callable[[Op, Any], object] | None = None,
    ) -> Any:
        begin = partial(_ReduceCall, self._engine.ops, check)
        return self.meet(name, begin, (parse_op(reduce_op), value, options))

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        operands = value, axis, self._engine.merged(options).timeout_seconds
        return self.meet("all_gather", partial(replica_context.GatherOfReplicas, self._engine), operands)


class _ReduceCall:
    """The all-reduce of replicas in a rank. ``check`` raises for a leaf that the call cannot reduce."""

    def __init__(self, ops: CrossDeviceOps, check: Callable[[Op, Any], object] | None):
        self._ops, self._check = ops, check
        self._total: IncrementalAllReduce | None = None
        self._called: tuple[Any, ...] = ()
        self._rebuild: list[Callable[[list[Any]], Any]] = []

    def give(self, operands: tuple[Op, Any, CommunicationOptions]) -> None:
        op, value, options = operands
        leaves, rebuild, form = nest.take_apart(value)
        if nest.holds(leaves, DistributedValues):
            leaves = [operand(op, leaf) for leaf in leaves]
        if self._check is not None:
            for leaf in leaves:
                self._check(op, leaf)
        called = op, options, form
        if self._total is None:
            self._called, self._total = called, IncrementalAllReduce(self._ops, op, options, form)
        elif called != self._called:
            raise ValueError(
                f"a replica calls all_reduce with {called}, and the first one of its rank with {self._called}: "
                "reductions, options and structures must be equal on all replicas"
            )
        self._total.add(leaves)
        self._rebuild.append(rebuild if leaves else lambda _: value)

    def make(self) -> list[Any]:
        assert self._total is not None
        totals = self._total.result()
        return [rebuild(own_copies(totals, i)) for i, rebuild in enumerate(self._rebuild)]


class _MergeCall:
    """The call of a function in cross-replica context, once in a rank."""

    def __init__(self, strategy: context.AnyStrategy, function: Callable[..., Any]):
        self._strategy, self._function = strategy, function
        self._given: list[Any] = []

    def give(self, arguments: Any) -> None:
        self._given.append(apart(arguments))

    def make(self) -> list[Any]:
        args, kwargs = regrouped(self._given)
        extended, results = self._strategy.extended, []
        with context.entered(extended.cross_replica_mode):
            result = self._function(self._strategy, *args, **kwargs)
            for i, replica in enumerate(extended.replica_contexts):
                # In the replica's own context, which says whose components these are.
                with context.entered(replica.mode):
                    components = components_but_variables(result)
                    results.append(components if i == 0 else apart(components))
        return results


def split_by_replica(tree: Any, count: int) -> list[Any]:
    """Return a structure for each replica of this rank, with its components."""
    if not nest.is_nested(tree):
        return [*components_of(tree, count)]  # fast path: to flatten an array takes 1 us
    leaves, rebuild = nest.flatten(tree)
    if not nest.holds(leaves, DistributedValues):
        return [tree] * count
    parts = [components_of(leaf, count) for leaf in leaves]
    return [rebuild([part[i] for part in parts]) for i in range(count)]


def run_replicas(extended: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """Run a function for each replica of this rank, and return its results by the rule of `regrouped`."""
    contexts = extended.replica_contexts

    def play(i: int) -> Any:
        with context.entered(contexts[i].mode):
            own_args = [*map(components_but_variables, args)]
            own_kwargs = {name: components_but_variables(arg) for name, arg in (kwargs or {}).items()}
            return fn(*own_args, **own_kwargs)

    return regrouped(extended.meeting.run(play), always=extended.wraps)
