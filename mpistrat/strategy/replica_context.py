"""The replica context: the identity of a replica, its collectives, and the components that its function gets.

The results of several replicas of a rank are regrouped as ``tf.distribute`` regroups the results of its devices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar, overload

import numpy as np

from mpistrat import context, nest
from mpistrat.arrays import arrays
from mpistrat.arrays.arrays import NUMBERS, from_host, to_host
from mpistrat.collectives import CommunicationOptions, structures
from mpistrat.collectives.asynchronous import PendingAllReduce, all_reduce_async, completed_all_reduce
from mpistrat.collectives.movement import any_library
from mpistrat.collectives.operations import Op, parse_op
from mpistrat.collectives.reduce_scatter import rows_of_ranks
from mpistrat.engine import Engine
from mpistrat.replicas.meeting import ReplicaMeeting
from mpistrat.runtime.agreement.collective_lock import collective_call
from mpistrat.values import OPS, ArrayLike, DistributedValues, IndexedSlices, PerReplica, ReduceOp, component, snapshot
from mpistrat.variables import Variable, operand

_Value = TypeVar("_Value")

_ONLY_ARRAYS = {np.ndarray}
_UNCHANGED = arrays.NUMBERS | {np.ndarray, str, bool}


def components(tree: Any) -> Any:
    """Return a structure with this replica's components in place of distributed values."""
    return _map(component, tree)


def components_but_variables(tree: Any) -> Any:
    """Return a structure as `components` does, but leave variables unchanged."""
    kind = type(tree)
    if kind in _UNCHANGED or (kind is tuple and set(map(type, tree)) == _ONLY_ARRAYS):
        return tree  # fast path: a number, or a batch
    return _map(_unless_variable, tree)


def _unless_variable(value: Any) -> Any:
    if isinstance(value, DistributedValues) and not isinstance(value, Variable):
        return component(value)
    return value


def _map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of the results, or the tree itself if no leaf changes, so that the program may write to it."""
    if not nest.is_nested(tree):
        return fn(tree)
    leaves, rebuild = nest.flatten(tree)
    others = [*map(fn, leaves)]
    return tree if all(map(operator.is_, leaves, others)) else rebuild(others)


def regrouped(values: Sequence[Any], *, always: bool = False) -> Any:
    """Return the structure of the values of this rank's replicas, with a `PerReplica` for each leaf.

    Unless ``always``, a leaf that is the same object on all replicas, as on a single one, is not wrapped.
    Raise ValueError if the structures differ.
    """
    first = values[0]
    if not any(map(nest.is_nested, values)):
        return _one(values, always)
    # None has no leaves to put beside the leaves of the others.
    without = [value is None for value in values]
    if any(without):
        return None if all(without) else PerReplica(tuple(values))
    leaves, rebuild, form = nest.take_apart(first)
    parts = [leaves]
    for value in values[1:]:
        taken = nest.take_apart(value)
        if taken.form != form or len(taken.leaves) != len(leaves):
            raise ValueError(
                f"a replica returns {len(taken.leaves)} value(s) {taken.form or ''}, and the first one of its rank "
                f"{len(leaves)} {form or ''}: their structures must be equal"
            )
        parts.append(taken.leaves)
    return rebuild([_one(leaf, always) for leaf in zip(*parts, strict=True)])


def _one(values: Sequence[Any], always: bool) -> Any:
    first = values[0]
    if always or not all(value is first for value in values):
        return PerReplica(tuple(values))
    return first


def apart(tree: Any) -> Any:
    """Return a structure with copies of its arrays, which the next replica may write to."""
    leaves, rebuild = nest.flatten(tree)
    return rebuild([leaf if isinstance(leaf, Variable) else snapshot(leaf) for leaf in leaves]) if leaves else tree


# --- the replica context --------------------------------------------------------


NOT_GATHERED = "IndexedSlices cannot be gathered: gather their values and indices"

_collective_call = collective_call(attrgetter("_engine.topology"))


class ReplicaContext:
    """The identity of a replica, and its collectives.

    `get_replica_context` returns it inside the function that `Strategy.run` runs.

    Parameters
    ----------
    strategy : Strategy
    replica_id_in_sync_group : int or None
        The number of the replica.

    Raises
    ------
    ValueError
        If the id cannot be converted to an int.

    Examples
    --------
    >>> import mpistrat
    >>> def fn(x):
    ...     replica = mpistrat.get_replica_context()
    ...     return replica.all_reduce("SUM", x) / replica.num_replicas_in_sync
    >>> float(mpistrat.MultiWorkerMirroredStrategy().run(fn, args=(3.0,)))
    3.0
    """

    number_here, played_here = 0, 1  # the index of this replica in its rank, and the replicas of the rank
    meeting: ReplicaMeeting | None = None  # with the other replicas of its rank

    def __init__(self, strategy: context.AnyStrategy, replica_id_in_sync_group: Any):
        if replica_id_in_sync_group is not None:
            try:
                replica_id_in_sync_group = int(replica_id_in_sync_group)
            except (TypeError, ValueError):
                raise ValueError(
                    f"replica_id_in_sync_group must be an int or None, not {replica_id_in_sync_group!r}"
                ) from None
        self._strategy = strategy
        self._engine: Engine = strategy.extended.engine
        self._id = replica_id_in_sync_group
        self.mode = context.Mode(strategy, self)

    @property
    def strategy(self) -> context.AnyStrategy:
        """The strategy that runs the function."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The number of this replica: 0 to ``num_replicas_in_sync - 1``."""
        return self._id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of this replica."""
        context.require_replica_context(self)
        return self._engine.devices

    def __enter__(self) -> None:
        context.stack().append(self.mode)

    def __exit__(self, exception_type: Any, exception_value: Any, traceback: Any) -> None:
        context.stack().pop()

    def merge_call(
        self, merge_fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``merge_fn(strategy, *args, **kwargs)`` in cross-replica context.

        Parameters
        ----------
        merge_fn : callable
        args : tuple
        kwargs : dict, optional

        Returns
        -------
        Any
            The result of ``merge_fn``, with this replica's component in place of distributed values.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        """
        strategy = self._strategy
        stack = context.stack()
        depth = len(stack)
        if not depth or stack[-1] is not self.mode:
            context.require_replica_context(self)
        try:
            stack.append(strategy.extended.cross_replica_mode)
            result = merge_fn(strategy, *args, **kwargs) if kwargs else merge_fn(strategy, *args)
        finally:
            del stack[depth:]  # not pop: a function that failed may have left contexts behind
        return None if result is None else components_but_variables(result)

    @overload
    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: ArrayLike | DistributedValues,
        options: CommunicationOptions | None = None,
    ) -> Any: ...
    @overload
    def all_reduce(
        self, reduce_op: ReduceOp | str, value: _Value, options: CommunicationOptions | None = None
    ) -> _Value: ...
    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Combine the values of all replicas; every replica gets the result.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            ``"SUM"``, ``"MEAN"``, ``"MAX"``, ``"MIN"`` or ``"PROD"``.
        value : array, number, IndexedSlices, or nested structure of these
            Shapes and dtypes must be equal on all replicas. Dtypes may be integer, floating point or complex.
            float16 and bfloat16 are added in float32.
        options : CommunicationOptions, optional

        Returns
        -------
        Any
            The same structure, with arrays of the caller's array library. The mean of integers is float64.

        Raises
        ------
        TypeError
            If a value is not numeric, or for SUM of bool.
        ValueError
            If the op is unknown. On every replica, if structures, shapes or dtypes differ between replicas.
        RuntimeError
            If this replica context is not the current one.
        """
        # Each call of a function costs 60 ns here. The usual arguments are recognised without one.
        stack = context.local.stack
        if not stack or stack[-1] is not self.mode:
            context.require_replica_context(self)
        try:
            op: Op = OPS[reduce_op]
        except (KeyError, TypeError):
            op = parse_op(reduce_op)
        # Fast path: a number, an array, or a list of arrays skips the flattening of a structure.
        engine, kind = self._engine, type(value)
        merged = engine.options if options is None else engine.merged(options)
        if kind is np.ndarray:
            return engine.ops.all_reduce(op, [value], merged)[0]
        if kind in NUMBERS and engine.joins_arrays:
            return engine.ops.all_reduce(op, [np.array(value)], merged)[0][()]
        if kind is list and value and [*map(type, value)].count(np.ndarray) == len(value):
            return engine.ops.all_reduce_arrays(op, value, merged, nest.IN_A_LIST)
        return self._all_reduce(op, value, options)

    @_collective_call
    def _all_reduce(self, op: Op, value: Any, options: CommunicationOptions | None) -> Any:
        engine = self._engine
        leaves, rebuild, form = nest.take_apart(value)
        if nest.holds(leaves, DistributedValues):
            seconds = engine.merged(options).timeout_seconds
            with structures.refusals("all_reduce", engine.topology, seconds):
                leaves = [operand(op, leaf) for leaf in leaves]
        totals = engine.all_reduce(op, leaves, options, form)
        return rebuild(totals) if leaves else value

    @_collective_call
    def experimental_all_reduce_async(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None
    ) -> PendingAllReduce:
        """Begin an `all_reduce` that runs while the program computes, and wait for its result later.

        For example, reduce the last layer's gradients while the layer before computes its own. All replicas
        must begin the same reductions in the same order; they may wait for them in any order. Values are copied at
        the beginning. The reduction proceeds as far as the MPI library progresses by itself, and at each ``test()``.

        Parameters
        ----------
        reduce_op, value
            As of `all_reduce`, without IndexedSlices.
        options : CommunicationOptions, optional
            ``timeout_seconds`` limits the beginning and the waiting, each. The implementation is MPI's
            ``Iallreduce``. With "tree", and on ranks that play several replicas, the beginning is an `all_reduce`.

        Returns
        -------
        PendingAllReduce
            With ``wait()``, which returns the combined value, and ``test()``.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As `all_reduce`.

        Examples
        --------
        >>> import mpistrat, numpy as np
        >>> def fn():
        ...     replica = mpistrat.get_replica_context()
        ...     pending = [replica.experimental_all_reduce_async("MEAN", np.full(3, i)) for i in range(4)]
        ...     return [int(handle.wait()[0]) for handle in reversed(pending)]
        >>> mpistrat.MultiWorkerMirroredStrategy().run(fn)
        [3, 2, 1, 0]
        """
        context.require_replica_context(self)
        op = parse_op(reduce_op)
        engine = self._engine
        merged = engine.merged(options)
        refuse_async(merged)
        leaves, rebuild, form = nest.take_apart(value)
        with structures.refusals("all_reduce_async", engine.topology, merged.timeout_seconds):
            for leaf in leaves:
                refuse_rows(op, leaf)
            leaves = [operand(op, leaf) for leaf in leaves]
            on_host = [to_host(leaf) for leaf in leaves]

        if merged.algorithm == "tree":  # a buffer would be reduced in place
            totals = engine.all_reduce(op, [*map(snapshot, leaves)], options, form)
            return completed_all_reduce(engine.topology, rebuild(totals))

        def unpack_values(totals: list[Any]) -> Any:
            return rebuild([from_host(*pair) for pair in zip(totals, leaves, strict=True)])

        return all_reduce_async(
            engine.topology, op, on_host, merged.bytes_per_pack, merged.timeout_seconds, unpack_values, form
        )

    @_collective_call
    def experimental_reduce_scatter(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Combine the values of all replicas; every replica gets its part of the rows.

        Use it where a replica needs only a part of the result, such as the gradients of the parameters that it
        updates for all. It moves half the bytes of an `all_reduce`. With `all_gather` after it, the two make an
        `all_reduce`.

        Parameters
        ----------
        reduce_op, value
            As of `all_reduce`, without numbers, scalars or IndexedSlices.
        options : CommunicationOptions, optional
            Only ``timeout_seconds`` is used, and the implementation "tree". "ordered" and "exact" raise.

        Returns
        -------
        Any
            The same structure. Every replica gets ``n // replicas`` of ``n`` rows along the first axis. The first
            ``n % replicas`` replicas get one more. Rows are given out in replica order.

        Raises
        ------
        TypeError, RuntimeError
            As `all_reduce`.
        ValueError
            As `all_reduce`, for a scalar, and if the options of the call or of the strategy ask for "ordered" or
            "exact".

        Examples
        --------
        >>> import mpistrat, numpy as np
        >>> def fn():
        ...     replica = mpistrat.get_replica_context()
        ...     part = replica.experimental_reduce_scatter("MEAN", np.arange(5.0))
        ...     return replica.all_gather(part, axis=0)
        >>> mpistrat.MultiWorkerMirroredStrategy().run(fn)
        array([0., 1., 2., 3., 4.])
        """
        context.require_replica_context(self)
        op = parse_op(reduce_op)
        engine = self._engine
        merged = engine.merged(options)
        refuse_scatter(merged)
        if merged.algorithm == "tree":
            # The tree adds whole arrays. Each replica takes its rows of the sum.
            return own_rows(self._all_reduce(op, value, options), self._id, engine.replicas.size)
        topology, seconds = engine.topology, merged.timeout_seconds
        leaves, rebuild, form = nest.take_apart(value)
        with structures.refusals("reduce_scatter", topology, seconds):
            if nest.holds(leaves, IndexedSlices):
                raise TypeError("IndexedSlices cannot be scattered: use all_reduce")
            leaves = [operand(op, leaf) for leaf in leaves]
            described = [any_library.described_for_scatter(op, leaf) for leaf in leaves]
        if form is not None:
            structures.agree(topology, "reduce_scatter", op.name, form, *described, timeout_seconds=seconds)
        return rebuild([any_library.scattered(topology, op, leaf, seconds) for leaf in leaves])

    @overload
    def all_gather(
        self, value: ArrayLike | DistributedValues, axis: int, options: CommunicationOptions | None = None
    ) -> Any: ...
    @overload
    def all_gather(self, value: _Value, axis: int, options: CommunicationOptions | None = None) -> _Value: ...
    @_collective_call
    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the values of all replicas along an axis; every replica gets the result.

        Parameters
        ----------
        value : array or nested structure of arrays
            Lengths along ``axis`` may differ between replicas. Other lengths and dtypes must be equal.
        axis : int
        options : CommunicationOptions, optional

        Returns
        -------
        Any
            The same structure.

        Raises
        ------
        ValueError
            If a value is a scalar or the axis is out of range. On every replica, if structures differ or
            shapes do not match.
        NotImplementedError
            For IndexedSlices.
        RuntimeError
            If this replica context is not the current one.
        """
        context.require_replica_context(self)
        return gather_replicas(self._engine, [value], axis, options)


def refuse_scatter(options: CommunicationOptions) -> None:
    """Raise for options that a reduce-scatter cannot have."""
    if options.algorithm in ("ordered", "exact"):
        raise ValueError(f"a reduce-scatter cannot be {options.algorithm}: use all_reduce, and take the rows")


def refuse_async(options: CommunicationOptions) -> None:
    """Raise for options that an asynchronous all-reduce cannot have."""
    if options.algorithm in ("ordered", "exact"):
        raise ValueError(f"an asynchronous all-reduce cannot be {options.algorithm}: use all_reduce")


def refuse_rows(op: Op, leaf: Any) -> None:
    """Raise TypeError for sparse rows, which an asynchronous all-reduce does not take."""
    if isinstance(leaf, IndexedSlices):
        raise TypeError("IndexedSlices cannot be reduced asynchronously: use all_reduce")


def own_rows(total: Any, replica: int, size: int) -> Any:
    """Return the rows of reduced arrays that belong to one of ``size`` replicas."""

    def rows(array: Any) -> Any:
        lengths = rows_of_ranks(array, size)
        first = sum(lengths[:replica])
        return array[first : first + lengths[replica]]

    return nest.map_structure(rows, total)


class GatherOfReplicas:
    """The all-gather of the replicas of a rank, which give their values one by one.

    With ``dst``, only the rank of this replica gets the values, and the others None.
    """

    def __init__(self, engine: Engine, dst: int | None = None):
        self._engine, self._dst = engine, dst
        self._given: list[list[Any]] = []

    def give(self, operands: tuple[Any, int, float | None]) -> None:
        value, axis, seconds = operands
        leaves, rebuild, form = nest.take_apart(value)
        if nest.holds(leaves, IndexedSlices):
            raise NotImplementedError(NOT_GATHERED)
        leaves = [component(leaf) for leaf in leaves]
        called = form, seconds, [any_library.described_for_gather(leaf, axis) for leaf in leaves]
        if not self._given:
            self._called, self._likes, self._rebuild = called, leaves, rebuild
        elif called != self._called:
            raise ValueError(f"a replica gathers {called}, and the first one of its rank {self._called}")
        several = self._engine.replicas.count > 1  # replicas, which may reuse memory before all have given
        self._given.append([to_host(leaf).copy() for leaf in leaves] if several else leaves)

    def make(self) -> list[Any]:
        form, seconds, described = self._called
        engine, dst, gathered = self._engine, self._dst, []
        if form is not None and dst is None:
            structures.agree(engine.topology, "all_gather", form, *described, timeout_seconds=seconds)
        elif form is not None:
            structures.agree(engine.topology, "gather", dst, form, timeout_seconds=seconds)
        root = None if dst is None else engine.replicas.rank_of(dst)
        for like, (_, axis, _), parts in zip(self._likes, described, zip(*self._given, strict=True), strict=True):
            whole = parts[0]
            if len(parts) > 1:  # dtype: else in native byte order, on these ranks only
                whole = from_host(np.concatenate(parts, axis, dtype=whole.dtype), like)
            gathered.append(engine.ops.gathered(whole, axis, seconds, root))
        if root not in (None, engine.topology.rank):
            return [None] * len(self._given)
        return [self._rebuild(own_copies(gathered, i)) for i in range(len(self._given))]


def gather_replicas(
    engine: Engine,
    values: Sequence[Any],
    axis: int,
    options: CommunicationOptions | None = None,
    dst: int | None = None,
) -> Any:
    """Concatenate the values of all replicas leaf by leaf; ``values`` are of this rank. Collective.

    With ``dst``, only the rank of this replica gets the result, and the others None.
    """
    seconds = engine.merged(options).timeout_seconds
    if dst is None and len(values) == 1 and type(values[0]) is np.ndarray:
        # Fast path: the collective itself compares one array.
        return engine.ops.gathered(values[0], axis, seconds)
    call = GatherOfReplicas(engine, dst)
    with structures.refusals("all_gather" if dst is None else "gather", engine.topology, seconds):
        for value in values:
            call.give((value, axis, seconds))
    return call.make()[0]


def own_copies(values: list[Any], i: int) -> list[Any]:
    """Return the results of a call for replica ``i`` of this rank: copies for all but the first."""
    return values if i == 0 else [*map(snapshot, values)]
