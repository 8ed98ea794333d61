"""The part of a strategy that libraries use, rather than training scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mpistrat import context, data, nest
from mpistrat.arrays.device import Device
from mpistrat.collectives import CollectiveAllReduce, CommunicationOptions, CrossDeviceOps
from mpistrat.collectives.operations import parse_op
from mpistrat.collectives.ops.base import check_destinations
from mpistrat.engine import Engine
from mpistrat.mesh import ShardedArray
from mpistrat.replicas import ReplicaGroup
from mpistrat.replicas.meeting import ReplicaMeeting
from mpistrat.runtime.agreement.collective_lock import collective_call
from mpistrat.runtime.topology import Topology
from mpistrat.strategy.former import MultiStepContext
from mpistrat.strategy.local_replicas import LocalReplicaContext
from mpistrat.strategy.replica_context import ReplicaContext, components
from mpistrat.values import Mirrored, ReduceOp, VariableSynchronization, component
from mpistrat.variables import (
    CutVariable,
    MirroredOfReplicas,
    MirroredVariable,
    SyncOnReadOfReplicas,
    SyncOnReadVariable,
    Variable,
    kind_on,
)

if TYPE_CHECKING:
    from mpistrat.data import Dataset

_collective_call = collective_call(attrgetter("engine.topology"))

UpdateCall = tuple[Variable, Callable[..., Any], tuple[Any, ...]]  # variable, function, arguments after it


class StrategyExtended:
    """The part of a strategy that optimizers and other libraries use.

    What combines or updates values raises RuntimeError in a replica context, and while another strategy is current.

    Parameters
    ----------
    container_strategy : Strategy
        The strategy that this object belongs to.
    topology : Topology, optional
        The ranks of the strategy; by default only this rank.
    device : Device, optional
        The device of this rank.
    cross_device_ops : CrossDeviceOps, optional
        How to reduce and broadcast; by default the fastest algorithm for each message.
    communication_options : CommunicationOptions, optional
        Options of all collectives of the strategy.

    Attributes
    ----------
    engine : Engine
        The ranks, ops, device and options, for the rooms of this library.
    meeting : ReplicaMeeting or None
        Of the replicas of this rank, unless each rank plays the replica of its own number.
    wraps : bool
        Whether `Strategy.run` returns a `PerReplica` also where a rank plays one replica.
    cross_replica_mode : Mode
        The entry on the stack of contexts in cross-replica context.

    Examples
    --------
    >>> import mpistrat
    >>> extended = mpistrat.MultiWorkerMirroredStrategy().extended
    >>> extended.worker_devices
    ('cpu:0',)
    """

    def __init__(
        self,
        container_strategy: context.AnyStrategy,
        topology: Topology | None = None,
        device: Device | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        replicas: ReplicaGroup | None = None,
        all_ranks: Topology | None = None,
    ):
        self._strategy = container_strategy
        self.engine: Engine = Engine(
            topology, device, cross_device_ops or self._usual_ops(), communication_options, replicas, all_ranks
        )
        engine = self.engine
        self.meeting = None if engine.replicas.by_rank else ReplicaMeeting(engine.topology, engine.replicas)
        self.wraps = engine.replicas.is_virtual  # what a function returns, also for one replica
        self.cross_replica_mode = context.Mode(container_strategy)
        self._update_mode = context.Mode(container_strategy, update_replica_id=self.engine.replicas.first)

    @cached_property
    def replica_context(self) -> ReplicaContext:
        """The context of this replica, or of the first one of this rank."""
        return self.replica_contexts[0]

    @cached_property
    def replica_contexts(self) -> tuple[ReplicaContext, ...]:
        """The contexts of the replicas of this rank."""
        local, meeting = self.engine.replicas.local, self.meeting
        if meeting is None:
            return (ReplicaContext(self._strategy, local[0]),)
        return tuple(LocalReplicaContext(self._strategy, replica, i, meeting) for i, replica in enumerate(local))

    _usual_ops: type[CrossDeviceOps] = CollectiveAllReduce

    # --- properties ------------------------------------------------------------------

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of this process that replica functions run on."""
        return self.engine.devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices of this process that variables live on."""
        return self.engine.devices

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether all shapes must be known beforehand: always False."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """Whether every worker runs the program itself: True with several replicas."""
        return self.engine.replicas.size > 1

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process initialises its variables: always True."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process saves checkpoints: True on the chief."""
        return self.engine.replicas.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: True on the chief."""
        return self.engine.replicas.is_chief

    # --- variables -------------------------------------------------------------------

    def variable_class(self, synchronization: VariableSynchronization) -> type[Variable]:
        """Return the class of new variables with this synchronization."""
        if synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable if self.meeting is None else SyncOnReadOfReplicas
        return MirroredVariable if self.meeting is None else MirroredOfReplicas

    def variable_class_for(self, value: Any, synchronization: VariableSynchronization) -> type[Variable]:
        """Return the class of a new variable with this initial value."""
        return CutVariable if isinstance(value, ShardedArray) else self.variable_class(synchronization)

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Return whether ``v`` was created while this strategy was current."""
        return getattr(v, "distribute_strategy", None) is self._strategy

    def value_container(self, value: Any) -> Any:
        """Return the variable that ``value`` is a component of, or ``value`` itself."""
        reference = getattr(value, "_container", None)
        # A weak reference, since the variable holds the component.
        container = None if reference is None else reference()
        return value if container is None else container

    def colocate_vars_with(self, colocate_with_variable: Variable) -> AbstractContextManager[None]:
        """Return a context in which new variables live on a variable's device.

        The context changes nothing, because all variables of a rank live on one device.

        Raises
        ------
        RuntimeError
            Outside of this strategy's scope.
        ValueError
            If another strategy created the variable.
        """
        context.require_scope(self._strategy)
        self.check_variable(colocate_with_variable, "colocate_vars_with")
        return nullcontext()

    def check_variable(self, variable: Any, method: str) -> None:
        """Raise unless ``variable`` is a variable of this strategy.

        Raises
        ------
        TypeError
            If ``variable`` is not a variable.
        ValueError
            If another strategy created it.
        """
        if not isinstance(variable, Variable):
            raise TypeError(
                f"{method} takes a variable, not {variable!r}: make it by mpistrat.Variable(value) in strategy.scope()"
            )
        if not self.variable_created_in_scope(self.value_container(variable)):
            raise ValueError(
                f"{method}: the variable {variable.name!r} was created by {variable.distribute_strategy!r}, "
                f"not by {self._strategy!r}: create it in this strategy's scope"
            )

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Run ``fn(component, *args, **kwargs)`` on this replica's copy of a variable.

        ``fn`` writes to this copy only, without communication. Pass values that are equal on all replicas,
        such as the results of `reduce_to`.

        Parameters
        ----------
        var : Variable
            A variable of this strategy.
        fn : callable
        args, kwargs
            ``fn`` gets this replica's component of distributed values among them.
        group : bool
            Whether to return one Mirrored result rather than the tuple of local results.

        Returns
        -------
        Mirrored or tuple

        Raises
        ------
        TypeError
            If ``var`` is not a variable.
        ValueError
            If another strategy created ``var``.
        RuntimeError
            If another strategy is current.
        """
        self.check_variable(var, "update")
        if context.current().replica_context not in self.replica_contexts:
            context.require_cross_replica(self._strategy, "update", "")
        result = self._in_update(fn, (component(var), *args), kwargs, group)
        var.after_local_write("update")
        return result

    def batch_update(self, calls: Sequence[UpdateCall], group: bool = True) -> list[Any]:
        """Do `update` for several variables. On parameter servers this takes one message to each.

        Parameters
        ----------
        calls : sequence of (variable, function, args)
            The arguments of each `update`.
        group : bool
            As in `update`.

        Returns
        -------
        list
            The result of each `update`.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As `update`.
        """
        calls = list(calls)
        for variable, _, _ in calls:
            self.check_variable(variable, "batch_update")
        return [self.update(variable, fn, args, group=group) for variable, fn, args in calls]

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` in update context, as `update` does for a variable."""
        context.require_cross_replica(self._strategy, "update_non_slot", "call it in merge_call")
        return self._in_update(fn, args, kwargs, group)

    def _in_update(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None, group: bool
    ) -> Any:
        # Fast path: flat arguments, as of optimizers, are not taken apart as structures.
        args = tuple(map(component, args)) if not any(map(nest.is_nested, args)) else components(args)
        kwargs = components(kwargs) if kwargs else {}
        stack = context.stack()
        depth = len(stack)
        try:
            stack.append(self._update_mode)
            result = fn(*args, **kwargs)
        finally:
            del stack[depth:]
        return Mirrored((result,)) if group else (result,)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """Return the devices for state that several variables share: this rank's devices."""
        return self.engine.devices

    # --- values ----------------------------------------------------------------------

    @_collective_call
    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Mirrored:
        """Combine one value over the replicas. Collective. Arguments and errors as `CrossDeviceOps.reduce`.

        ``reduce_op`` may be a VariableAggregation, and ``experimental_hints`` is the former name of ``options``.
        """
        context.require_cross_replica(self._strategy, "reduce_to", "use all_reduce of the replica context")
        op = parse_op(reduce_op)
        return self.engine.ops.reduce(op, value, destinations, self.engine.merged(options or experimental_hints))

    @_collective_call
    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Mirrored]:
        """Combine many values over the replicas in as few messages as possible. Collective.

        As `CrossDeviceOps.batch_reduce`, with the arguments of `reduce_to`.
        """
        context.require_cross_replica(self._strategy, "batch_reduce_to", "use all_reduce of the replica context")
        op, merged = parse_op(reduce_op), self.engine.merged(options or experimental_hints)
        return self.engine.ops.batch_reduce(op, value_destination_pairs, merged)

    @_collective_call
    def broadcast_to(self, tensor: Any, destinations: Any) -> Mirrored:
        """Return the value of replica 0 on every replica. Collective. As `CrossDeviceOps.broadcast`.

        Shape and dtype must be equal on all replicas.
        """
        context.require_cross_replica(self._strategy, "broadcast_to", "call it in merge_call")
        check_destinations(destinations)
        return self.engine.ops.broadcast(tensor, destinations)

    def read_var(self, v: Variable) -> Any:
        """Return the value of a variable. A former name of `Variable.read_value`."""
        self.check_variable(v, "read_var")
        return v.read_value()

    def batch_read(self, variables: Sequence[Variable]) -> list[Any]:
        """Return copies of the values of variables. On parameter servers this takes one message to each.

        Raises
        ------
        TypeError, ValueError
            As `read_var`.

        Examples
        --------
        >>> import mpistrat
        >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
        >>> with strategy.scope():
        ...     v, w = mpistrat.Variable(1.0), mpistrat.Variable([2.0])
        >>> [value.tolist() for value in strategy.extended.batch_read([v, w])]
        [1.0, [2.0]]
        """
        return [self.read_var(variable) for variable in variables]

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Dataset:
        """Return a dataset over arrays in memory. A former name of `Dataset.from_arrays`; ``session`` is ignored."""
        context.require_cross_replica(self._strategy, "experimental_make_numpy_dataset", "call it before run")
        return data.Dataset.from_arrays(numpy_input)

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[..., Any],
        iterator: Any,
        iterations: int = 1,
        initial_loop_values: dict[str, Any] | None = None,
    ) -> MultiStepContext:
        """Call ``fn(context, batch)`` for the next batches of an iterator.

        Parameters
        ----------
        fn : callable
            Called in cross-replica context, so that it calls `Strategy.run` itself. It keeps what the caller needs by
            ``context.set_last_step_output(name, value, reduce_op)``.
        iterator : iterator
            For example ``iter`` of a distributed dataset.
        iterations : int
            The number of batches.
        initial_loop_values : dict, optional
            The outputs before the first step.

        Returns
        -------
        MultiStepContext
            With the outputs of the last step in ``last_step_outputs``.

        Raises
        ------
        StopIteration
            If the iterator has fewer batches.

        Examples
        --------
        >>> import mpistrat, numpy as np
        >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
        >>> def step(context, batch):
        ...     total = strategy.run(np.sum, args=(batch,))
        ...     context.set_last_step_output("total", total, "SUM")
        >>> batches = iter([np.array([1, 2]), np.array([3, 4])])
        >>> with strategy.scope():
        ...     made = strategy.extended.experimental_run_steps_on_iterator(step, batches, 2)
        >>> int(made.last_step_outputs["total"])
        7
        """
        context.require_cross_replica(self._strategy, "experimental_run_steps_on_iterator", "call it outside of run")
        step_context = MultiStepContext(initial_loop_values)
        with self._strategy.scope():
            for _ in range(iterations):
                fn(step_context, next(iterator))
        return step_context

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function once per replica, as `Strategy.run` does."""
        return self._strategy.run(fn, args, kwargs)


class LocalExtended(StrategyExtended):
    """What a strategy of one replica does: its variables are arrays of this process, without copies elsewhere."""

    def variable_class(self, synchronization: VariableSynchronization) -> type[Variable]:
        return kind_on(self.engine.variable_device)
