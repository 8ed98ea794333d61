"""The default strategy, and the current one: outside of every scope it has one replica and does not communicate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from mpistrat import context, data, nest
from mpistrat.collectives import CommunicationOptions
from mpistrat.collectives.operations import parse_op
from mpistrat.collectives.ops.default import Copies
from mpistrat.process import mpi
from mpistrat.strategy.extended import LocalExtended
from mpistrat.strategy.replica_context import NOT_GATHERED, ReplicaContext
from mpistrat.strategy.strategy import Scope, Strategy
from mpistrat.values import IndexedSlices, Mirrored, ReduceOp, ValueContext, snapshot
from mpistrat.variables import Variable

if TYPE_CHECKING:
    from mpistrat.data import Dataset, InputContext, InputOptions


class _DefaultStrategy(Strategy):
    """The strategy outside of every scope: plain variables, values returned unchanged."""

    def __init__(self) -> None:
        if _strategy:
            raise RuntimeError("there is one default strategy: get it by get_strategy()")
        super().__init__(_DefaultExtended(self))

    def scope(self) -> Scope[Any]:
        return _DefaultScope(self)

    def gather(self, value: Any, axis: int, dst: int | None = None) -> Any:
        if dst is not None:
            self._extended.engine.replicas.checked("dst", dst)
        return nest.map_structure(_gathered, value)

    def experimental_distribute_dataset(self, dataset: Dataset, options: InputOptions | None = None) -> Any:
        return dataset

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> Any:
        return dataset_fn(data.InputContext())

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        return value_fn(ValueContext())

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError("the default strategy cannot be copied: there is one")

    def __repr__(self) -> str:
        return "<default strategy>"


class _DefaultScope(Scope[Strategy]):
    """A scope that changes nothing. It must not be entered inside another strategy's scope."""

    __slots__ = ()

    def __enter__(self) -> Strategy:
        if context.current().strategy is not self._strategy:
            raise RuntimeError("Must not nest tf.distribute.Strategy scopes: the default one goes inside no other")
        return self._strategy

    def __exit__(self, *exc_info: object) -> None:
        pass


class _DefaultReplicaContext(ReplicaContext):
    """The replica context outside of every strategy. Among several ranks its collectives warn: they combine nothing."""

    def merge_call(
        self, merge_fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        _warn_of_one_replica("merge_call")
        return super().merge_call(merge_fn, args, kwargs)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        _warn_of_one_replica("all_reduce")
        return super().all_reduce(reduce_op, value, options)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        _warn_of_one_replica("all_gather")
        return super().all_gather(value, axis, options)


def _warn_of_one_replica(method: str) -> None:
    # `strategy.run` of the default strategy is meant, and a mode is on the stack in it. The call sites are counted by
    # Python's filters of warnings: one warning for each line.
    if context.is_default() and mpi.running() and mpi.among_several() and mpi.start().COMM_WORLD.rank == 0:
        warnings.warn(
            f"{method} outside of `strategy.run` is that of the default strategy, which has one replica: the result "
            "has the value of this rank alone. Call it in the function that `strategy.run` runs",
            RuntimeWarning,
            stacklevel=3,
        )


class _DefaultExtended(LocalExtended):
    _usual_ops = Copies

    @cached_property
    def replica_context(self) -> ReplicaContext:
        """The context of the one replica."""
        return _DefaultReplicaContext(self._strategy, 0)

    def colocate_vars_with(self, colocate_with_variable: Variable) -> AbstractContextManager[None]:
        """Return a context that changes nothing: all variables live on one device."""
        return nullcontext()

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Return a copy of the value."""
        parse_op(reduce_op)
        return nest.map_structure(snapshot, value)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Return copies of the values."""
        parse_op(reduce_op)
        return [nest.map_structure(snapshot, value) for value, _ in value_destination_pairs]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Mirrored:
        """Raise NotImplementedError: the default strategy has no devices."""
        if destinations is None:
            raise TypeError("destinations must be a variable, a value or the name of a device, not None")
        raise NotImplementedError("the default strategy has no devices to broadcast to")

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """Return the variable with the smallest name."""
        return min(var_list, key=lambda variable: variable.name)

    @property
    def worker_devices(self) -> NoReturn:
        """RuntimeError: the default strategy has no devices."""
        raise RuntimeError("worker_devices: the default strategy has no devices; create a strategy")

    @property
    def parameter_devices(self) -> NoReturn:
        """RuntimeError: the default strategy has no devices."""
        raise RuntimeError("parameter_devices: the default strategy has no devices; create a strategy")


def _gathered(value: Any) -> Any:
    if isinstance(value, IndexedSlices):
        raise NotImplementedError(NOT_GATHERED)
    return snapshot(value)


_strategy: list[_DefaultStrategy] = []  # one, which makes the constructor refuse another
_strategy.append(_DefaultStrategy())
_mode = _strategy[0].extended.replica_context.mode


def default_mode() -> context.Mode:
    """Return the mode of the default strategy in its replica context."""
    return _mode


context.set_default(default_mode)


def get_strategy() -> Strategy:
    """Return the current strategy: the default strategy outside of every scope.

    Examples
    --------
    >>> get_strategy().num_replicas_in_sync
    1
    """
    return context.current().strategy


def has_strategy() -> bool:
    """Return whether a strategy other than the default one is current.

    Examples
    --------
    >>> has_strategy()
    False
    """
    return context.current().strategy is not default_mode().strategy


def get_replica_context() -> ReplicaContext | Any:
    """Return the current replica context, or None in cross-replica context.

    Examples
    --------
    >>> get_replica_context().num_replicas_in_sync
    1
    """
    return context.current().replica_context  # Any rather than None: a replica's function need not ask for None


def in_cross_replica_context() -> bool:
    """Return whether the current context is a cross-replica context.

    Examples
    --------
    >>> in_cross_replica_context()
    False
    """
    return context.current().replica_context is None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make a strategy current in this thread without a ``with`` block. None leaves it again.

    Raises
    ------
    RuntimeError
        If a ``with strategy.scope()`` is active.
    TypeError
        If ``strategy`` is neither a strategy nor None.

    Examples
    --------
    >>> import mpistrat
    >>> experimental_set_strategy(mpistrat.OneDeviceStrategy("cpu:0"))
    >>> has_strategy()
    True
    >>> experimental_set_strategy(None)
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(f"experimental_set_strategy() takes a strategy or None, not {strategy!r}")
    stack = context.stack()
    if stack and not (len(stack) == 1 and isinstance(stack[0], _SetMode)):
        raise RuntimeError("Must not be called inside a strategy scope: leave `with strategy.scope()` first")
    # At most the entry of an earlier call, as checked above.
    stack.clear()
    if strategy is not None and strategy is not default_mode().strategy:
        stack.append(_SetMode(strategy))


class _SetMode(context.Mode):
    """The mode that `experimental_set_strategy` entered."""

    __slots__ = ()
