"""The collectives of a strategy, which the program calls outside of replica functions."""

from __future__ import annotations

from operator import attrgetter
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from mpistrat import context, nest
from mpistrat.arrays.arrays import NUMBERS, from_host, to_host
from mpistrat.collectives import CommunicationOptions, structures
from mpistrat.collectives.movement import moves
from mpistrat.collectives.operations import Op, parse_op
from mpistrat.collectives.ops.of_replicas import components_of
from mpistrat.engine import Engine
from mpistrat.runtime.agreement.collective_lock import collective_call
from mpistrat.strategy.axis_reduction import reduce_over_axis
from mpistrat.strategy.local_replicas import split_by_replica
from mpistrat.strategy.replica_context import gather_replicas, regrouped
from mpistrat.values import OPS, ArrayLike, DistributedValues, IndexedSlices, Mirrored, ReduceOp, component, snapshot

if TYPE_CHECKING:
    from mpistrat.strategy.extended import StrategyExtended

_Value = TypeVar("_Value")
_collective_call = collective_call(attrgetter("_extended.engine.topology"))


class Collectives:
    """The collectives of a strategy. They raise RuntimeError in a replica context, and in the scope of another one."""

    _extended: StrategyExtended

    # --- reductions ------------------------------------------------------------------

    @overload
    def reduce(self, reduce_op: ReduceOp | str, value: ArrayLike | DistributedValues, axis: None) -> Any: ...
    @overload
    def reduce(self, reduce_op: ReduceOp | str, value: _Value, axis: None) -> _Value: ...
    @overload
    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | tuple[int, ...] | EllipsisType = ...
    ) -> Any: ...
    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | tuple[int, ...] | EllipsisType | None = ...
    ) -> Any:
        """Combine the values of all replicas into one value on every replica. Collective.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            ``"SUM"``, ``"MEAN"``, ``"MAX"``, ``"MIN"`` or ``"PROD"``.
        value : PerReplica, array, number, or nested structure of these
            A plain value counts as this replica's. With an ``axis``, a list is one array, as in a `Dataset`. Without,
            a list is a structure of values.
        axis : int, tuple of int or None
            None combines the values of the replicas element by element. Others also reduce over these axes of the
            value. It must be given, as in TensorFlow. Their lengths may differ between replicas. The mean is
            taken over all examples; it is not the mean of the replicas' means.

        Returns
        -------
        Any
            The same structure. Sums and products over an axis widen small integers as ``numpy.sum`` does. The mean of
            integers is float64.

        Raises
        ------
        ValueError
            For an unknown op, an axis out of range, SUM or PROD of a Mirrored value, and for MAX or MIN over an axis
            without values on any replica. On every replica, if structures, shapes or dtypes differ between replicas.
        TypeError
            If ``axis`` is left out or a value is not numeric, for SUM of bool, and for a structure other than a list
            with an axis.

        Examples
        --------
        >>> import mpistrat, numpy as np
        >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
        >>> float(strategy.reduce("MEAN", np.array([1.0, 2.0, 6.0]), axis=0))
        3.0
        """
        # Each call of a function costs 60 ns here. The usual arguments are recognised without one.
        try:
            op: Op = OPS[reduce_op]
        except (KeyError, TypeError):
            op = parse_op(reduce_op)
        if context.local.stack:
            context.require_cross_replica(self, "reduce", "use all_reduce of the replica context")
        if axis is None:
            engine = self._extended.engine
            if type(value) is np.ndarray:  # fast path: skips the structure
                return engine.ops.all_reduce(op, [value], engine.options)[0]
            if type(value) in NUMBERS and engine.joins_arrays:
                return engine.ops.all_reduce(op, [np.array(value)], engine.options)[0][()]
        if axis is ...:
            raise TypeError(
                "reduce needs an axis: axis=None combines the values of the replicas element by element, and axis=0 "
                "also reduces over the first dimension of each value, such as the rows of a batch"
            )
        return self._reduce(op, value, axis)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Combine the values of all replicas into one value on every replica, as `reduce` without an axis. Collective.

        Parameters
        ----------
        reduce_op, value
            As in `reduce`.
        options : CommunicationOptions, optional
            Options of this call.

        Returns
        -------
        Any
            The same structure.

        Raises
        ------
        ValueError, TypeError, RuntimeError
            As `reduce`.

        Examples
        --------
        >>> import mpistrat
        >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
        >>> float(strategy.all_reduce("MAX", 0.25))
        0.25
        """
        op = parse_op(reduce_op)
        context.require_cross_replica(self, "all_reduce", "use all_reduce of the replica context")
        return self._reduce(op, value, None, options)

    @_collective_call
    def _reduce(
        self, op: Op, value: Any, axis: int | tuple[int, ...] | None, options: CommunicationOptions | None = None
    ) -> Any:
        if axis is not None:
            return reduce_over_axis(self._extended, op, value, axis)
        engine = self._extended.engine
        leaves, rebuild, form = nest.take_apart(value)
        if not nest.holds(leaves, DistributedValues):
            totals = engine.all_reduce(op, leaves, options, form)
            return rebuild(totals) if leaves else value
        values = engine.contributions(op, leaves, form)
        # Mirrored values are equal on all replicas already: nothing is sent for them.
        sent = [value for value, leaf in zip(values, leaves, strict=True) if not isinstance(leaf, Mirrored)]
        done = iter(engine.all_reduce(op, sent, options, form) if sent else ())
        return rebuild([snapshot(leaf) if isinstance(leaf, Mirrored) else next(done) for leaf in leaves])

    # --- moves -----------------------------------------------------------------------

    @_collective_call
    def gather(self, value: Any, axis: int, dst: int | None = None) -> Any:
        """Concatenate the values of all replicas along an axis, on every replica or on one. Collective.

        Parameters
        ----------
        value : PerReplica, array, or nested structure of these
            Lengths along ``axis`` may differ. Other lengths and dtypes must be equal on all replicas.
        axis : int
        dst : int, optional
            The replica that gets the result; by default all of them.

        Returns
        -------
        Any
            The same structure. None on other replicas than ``dst``.

        Raises
        ------
        ValueError
            If a value is a scalar, the axis is out of range, or ``dst`` is not a replica. On every replica, if
            structures differ or shapes do not match.
        NotImplementedError
            For IndexedSlices.
        """
        context.require_cross_replica(self, "gather", "use all_gather of the replica context")
        engine, values = self._engine, [value]
        replicas = engine.replicas
        if dst is not None or replicas.count > 1:
            with structures.refusals("gather", engine.topology):
                dst = None if dst is None else replicas.checked("dst", dst)
                values = values if replicas.count == 1 else split_by_replica(value, replicas.count)
        return gather_replicas(engine, values, axis, None, dst)

    @_collective_call
    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return the values of one replica on every replica. Collective.

        Parameters
        ----------
        value : PerReplica, array, number, variable, or nested structure of these
            On other replicas than ``src`` it gives the structure, dtypes and shapes, which must be equal. Use
            `broadcast_object` where these are not known.
        src : int
            The replica whose values are sent.

        Returns
        -------
        Any
            The same structure, with arrays of the caller's array library.

        Raises
        ------
        ValueError
            If ``src`` is not a replica. On every replica, if structures, shapes or dtypes differ between replicas.
        TypeError
            If an array holds Python objects, and for IndexedSlices.

        Examples
        --------
        >>> import mpistrat
        >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
        >>> float(strategy.broadcast({"seed": 3.0 + strategy.comm.rank})["seed"])
        3.0
        """
        context.require_cross_replica(self, "broadcast", "call it outside of run, or in merge_call")
        topology, replicas = self._engine.topology, self._engine.replicas
        leaves, rebuild, form = nest.take_apart(value)
        with structures.refusals("broadcast", topology):
            src = replicas.checked("src", src)
            if nest.holds(leaves, IndexedSlices):
                raise TypeError("IndexedSlices cannot be broadcast: broadcast their values and indices")
            # A rank that plays other replicas gives the dtypes and shapes of its first one.
            index = src - replicas.first if src in replicas.local else 0
            leaves = [components_of(leaf, replicas.count)[index] for leaf in leaves]
            hosts = [to_host(leaf) for leaf in leaves]
        received = moves.broadcast(topology, hosts, form, root=replicas.rank_of(src))
        return rebuild([from_host(*pair) for pair in zip(received, leaves, strict=True)])

    @_collective_call
    def scatter(self, value: Any, axis: int = 0, src: int = 0) -> Any:
        """Cut the arrays of one replica along an axis, and return to each replica its part. Collective.

        `gather` along the same axis makes the arrays whole again.

        Parameters
        ----------
        value : array, or nested structure of these
            On other replicas than ``src`` it is not used, and may be None.
        axis : int
        src : int
            The replica whose arrays are cut.

        Returns
        -------
        Any
            The structure of replica ``src``, with NumPy arrays. Of ``n`` rows every replica gets ``n // replicas``, and
            the first ``n % replicas`` replicas get one more. With ``virtual_replicas``, a PerReplica in place of each
            array, as `run` returns.

        Raises
        ------
        ValueError
            If an array is a scalar, the axis is out of range, or ``src`` is not a replica. On every replica.
        TypeError
            If an array holds Python objects, and for IndexedSlices.

        Examples
        --------
        >>> import mpistrat, numpy as np
        >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
        >>> rows = np.arange(5) if strategy.is_chief else None
        >>> strategy.gather(strategy.scatter(rows), axis=0)
        array([0, 1, 2, 3, 4])
        """
        context.require_cross_replica(self, "scatter", "call it outside of run, or in merge_call")
        topology, replicas = self._engine.topology, self._engine.replicas
        leaves: list[Any] = []
        skeleton = None
        with structures.refusals("scatter", topology):
            src = replicas.checked("src", src)
            if src in replicas.local:
                leaves, rebuild, _ = nest.take_apart(value)
                if nest.holds(leaves, IndexedSlices):
                    raise TypeError("IndexedSlices cannot be scattered: scatter their values and indices")
                leaves = [to_host(component(leaf)) for leaf in leaves]
                # The other replicas lack the structure: it is sent with numbers in place of arrays.
                skeleton = rebuild([*range(len(leaves))])
        scattered = moves.scatter(topology, leaves, axis, replicas.rank_of(src), skeleton, replicas.blocks)
        _, rebuild = nest.flatten(scattered.note)
        return regrouped([rebuild(part) for part in scattered.parts], always=replicas.is_virtual)

    @_collective_call
    def gather_object(self, value: Any, dst: int | None = None) -> list[Any] | None:
        """Return every replica's object, in replica order, on every replica or on one. Collective.

        Parameters
        ----------
        value : Any
            What can be pickled.
        dst : int, optional
            The replica that gets the objects; by default all of them.

        Returns
        -------
        list or None
            None on other replicas than ``dst``.

        Raises
        ------
        ValueError
            If ``dst`` is not a replica.

        Examples
        --------
        >>> import mpistrat
        >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
        >>> strategy.gather_object(strategy.comm.rank) == [*range(strategy.num_replicas_in_sync)]
        True
        """
        context.require_cross_replica(self, "gather_object", "call it outside of run, or in merge_call")
        topology, replicas = self._engine.topology, self._engine.replicas
        with structures.refusals("gather_object", topology):
            root = None if dst is None else replicas.rank_of(replicas.checked("dst", dst))
            is_whole = replicas.by_rank and not replicas.is_virtual  # any object, as it is
            # The objects of the replicas of a rank travel together.
            own = value if is_whole else split_by_replica(value, replicas.count)
        of_ranks = moves.gather_object(topology, own, root)
        if is_whole:
            return of_ranks
        if of_ranks is None:
            return None
        ranks, blocks = map(replicas.rank_of, range(replicas.size)), replicas.blocks
        return [of_ranks[rank][replica - blocks[rank].start] for replica, rank in enumerate(ranks)]

    @_collective_call
    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return the object of one replica on every replica. Collective.

        Parameters
        ----------
        value : Any
            What can be pickled. On other replicas than ``src`` it is not used.
        src : int

        Returns
        -------
        Any

        Raises
        ------
        ValueError
            If ``src`` is not a replica.

        Examples
        --------
        >>> import mpistrat
        >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
        >>> strategy.broadcast_object({"name": "run 7"} if strategy.is_chief else None)
        {'name': 'run 7'}
        """
        context.require_cross_replica(self, "broadcast_object", "call it outside of run, or in merge_call")
        topology, replicas = self._engine.topology, self._engine.replicas
        with structures.refusals("broadcast_object", topology):
            src = replicas.checked("src", src)
        return topology.broadcast_object(value, replicas.rank_of(src))

    @property
    def _engine(self) -> Engine:
        return self._extended.engine


# Python names a method by this in its messages, and users know the methods of a strategy.
for _name, _method in vars(Collectives).items():
    if not _name.startswith("_"):
        for _function in {_method, getattr(_method, "__wrapped__", _method)}:
            _function.__qualname__ = f"Strategy.{_name}"
