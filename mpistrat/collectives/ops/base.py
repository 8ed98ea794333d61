"""The base class of cross-device ops, with the all-reduce of sparse rows by gathers, and the check of destinations."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrat.arrays.device import Device
from mpistrat.collectives import structures
from mpistrat.collectives.movement import any_library
from mpistrat.collectives.operations import FurtherOp, Op, accumulator, divide, parse_op, result_dtype
from mpistrat.collectives.options import CommunicationOptions
from mpistrat.collectives.reduce_scatter import Parts
from mpistrat.collectives.reduction import Key, Reduction
from mpistrat.runtime.agreement.collective_lock import collective_call
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Topology
from mpistrat.values import (
    DistributedValues,
    IndexedSlices,
    Mirrored,
    PerReplica,
    ReduceOp,
    component,
    reducible,
    snapshot,
)

IN_PAIRS = "in pairs"  # the form that `CrossDeviceOps.batch_reduce` lets the ranks compare

HOOKS = ("reduce_implementation", "batch_reduce_implementation")  # what `CrossDeviceOps.all_reduce` calls

_collective_call = collective_call(attrgetter("_ranks"))
collective_all_reduce = collective_call(attrgetter("_ranks"), "all_reduce")


class CrossDeviceOps:
    """The reductions and broadcasts of a strategy. Subclass it to use your own algorithm.

    Override `reduce_implementation` and `batch_reduce_implementation`, and `broadcast_implementation` if needed. The
    public methods check the arguments and call them. Give an object to a strategy before use:
    ``MirroredStrategy(cross_device_ops=MyOps())``.

    Examples
    --------
    >>> import mpistrat
    >>> class Logged(mpistrat.ReductionToOneDevice):
    ...     def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
    ...         print("reduce", reduce_op.name)
    ...         return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)
    >>> strategy = mpistrat.MirroredStrategy(cross_device_ops=Logged())
    >>> float(strategy.reduce("SUM", 2.0, axis=None))
    reduce SUM
    2.0
    """

    _topology: Topology | None = None  # a subclass may not call __init__

    def bound_to(self, topology: Topology) -> CrossDeviceOps:
        """Return these ops for the ranks of a strategy; a copy if they belong to other ranks already."""
        if self._topology not in (None, topology):
            return copy.copy(self)._rebound_to(topology)
        return self._rebound_to(topology)

    def _rebound_to(self, topology: Topology) -> CrossDeviceOps:
        self._topology = topology
        return self

    @property
    def _ranks(self) -> Topology:
        topology = self._topology
        if topology is None:
            raise RuntimeError(
                f"{type(self).__name__} does not belong to a strategy yet: give it to one, for example "
                "MirroredStrategy(cross_device_ops=...)"
            )
        return topology

    @_collective_call
    def reduce(
        self,
        reduce_op: Op | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Mirrored:
        """Combine one value over all replicas.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            ``"SUM"``, ``"MEAN"``, ``"MAX"``, ``"MIN"`` or ``"PROD"``.
        per_replica_value : PerReplica, array or number
            A plain value is the value of this replica.
        destinations : variable, distributed value, array or device name
            Checked and given to the hook. Each rank has one device, and every rank gets the result.
        options : CommunicationOptions, optional

        Returns
        -------
        Mirrored
            The result, on every replica.

        Raises
        ------
        ValueError
            If ``destinations`` is an empty name, or the value is mirrored and the op SUM.
        RuntimeError
            If this object does not belong to a strategy.
        """
        op = parse_op(reduce_op)
        check_destinations(destinations)
        options = options or CommunicationOptions()
        self._compare(op, None, [per_replica_value], options)
        value = _per_replica(op, per_replica_value)
        if isinstance(value, Mirrored):
            return Mirrored((snapshot(value),))
        return mirrored(self.reduce_implementation(op, value, destinations, options))

    @_collective_call
    def batch_reduce(
        self,
        reduce_op: Op | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Mirrored]:
        """Combine many values over all replicas in as few messages as possible.

        Parameters
        ----------
        reduce_op : ReduceOp or str
        value_destination_pairs : sequence of (value, destinations)
        options : CommunicationOptions, optional

        Returns
        -------
        list of Mirrored
            The results in the order of the pairs.

        Raises
        ------
        ValueError
            If an element is not a pair, or as `reduce`.
        """
        op = parse_op(reduce_op)
        pairs = list(value_destination_pairs)
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise ValueError(f"value_destination_pairs must be pairs (value, destinations), not {pair!r}")
            check_destinations(pair[1])
        options = options or CommunicationOptions()
        self._compare(op, IN_PAIRS, [value for value, _ in pairs], options)
        values = [_per_replica(op, value) for value, _ in pairs]
        todo = [(v, pair[1]) for v, pair in zip(values, pairs, strict=True) if not isinstance(v, Mirrored)]
        done = iter(self.batch_reduce_implementation(op, todo, options) if todo else ())
        return [Mirrored((snapshot(v),)) if isinstance(v, Mirrored) else mirrored(next(done)) for v in values]

    @_collective_call
    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """Return the value of replica 0 on every replica.

        Parameters
        ----------
        tensor : array or number
        destinations : variable, distributed value, array or device name

        Returns
        -------
        Mirrored
        """
        check_destinations(destinations)
        return mirrored(self.broadcast_implementation(tensor, destinations))

    def reduce_implementation(
        self, reduce_op: Op, per_replica_value: DistributedValues, destinations: Any, options: Any
    ) -> Any:
        """Reduce one value: the hook of `reduce`, called with checked arguments. Return an array or a Mirrored."""
        raise NotImplementedError(f"{type(self).__name__} must override reduce_implementation")

    def batch_reduce_implementation(
        self, reduce_op: Op, value_destination_pairs: Sequence[tuple[DistributedValues, Any]], options: Any
    ) -> Sequence[Any]:
        """Reduce many values: the hook of `batch_reduce`. Return an array or a Mirrored for each pair."""
        raise NotImplementedError(f"{type(self).__name__} must override batch_reduce_implementation")

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Broadcast one value: the hook of `broadcast`. Return an array or a Mirrored."""
        return any_library.broadcasted(self._ranks, component(tensor))

    def _compare(self, op: Op, form: Hashable, values: Sequence[Any], options: CommunicationOptions) -> None:
        """Raise on every rank if the values differ between ranks in form or in the kinds of leaves. Collective."""
        kinds = tuple(map(structures.kind_across_replicas, values))
        structures.agree(self._ranks, "all_reduce", op.name, form, kinds, timeout_seconds=options.timeout_seconds)

    def joins_arrays(self, options: CommunicationOptions) -> bool:
        """Return whether a caller may join arrays before they are reduced. The hooks get them as they are."""
        return False

    def joined_all_reduce(
        self, op: Op, key: Key, out: np.ndarray, options: CommunicationOptions, form: Hashable
    ) -> Reduction | None:
        """Return a prepared `all_reduce` of arrays of these dtypes and shapes into one flat array, if there is one.

        Its result is ``out``. The ranks compare what `all_reduce` of ``out`` compares.
        """
        return None

    def reduce_parts(
        self, op: Op, dtype: np.dtype, parts: Parts, options: CommunicationOptions, form: Hashable
    ) -> np.ndarray | None:
        """Return the reduction of this rank's part, as `reduce_scatter.reduce_parts`; None if hooks see the arrays.

        The ranks compare ``form``.
        """
        return None

    def gathered(self, value: Any, axis: int, timeout_seconds: float | None = None, root: int | None = None) -> Any:
        """Return the values of all replicas along an axis; ``value`` has the values of this rank's. Collective.

        With ``root``, only this rank gets the result, and the others None.
        """
        return any_library.gathered(self._ranks, value, axis, timeout_seconds, root)

    def all_reduce_rows(self, op: Op, value: IndexedSlices, timeout_seconds: float | None = None) -> IndexedSlices:
        """Return the rows of all replicas in replica order, for a mean each divided by the number of replicas.

        Rows of equal index stay separate. Raise ValueError if row shapes, dtypes or dense shapes differ between ranks.
        """
        if isinstance(op, FurtherOp):
            raise TypeError(f"{op.name} of sparse rows is not defined: make them dense")
        accumulator(value.dtype, op)
        description = operation("all_reduce of sparse rows", op.name, value.dense_shape)
        self._ranks.lock.compare(description, timeout_seconds)
        rows, indices = (self.gathered(array, 0, timeout_seconds) for array in (value.values, value.indices))
        if op is ReduceOp.MEAN:
            wide = rows.astype(accumulator(value.dtype, op), copy=False)
            rows = divide(wide, self._number_of_replicas()).astype(result_dtype(value.dtype, op), copy=False)
        return IndexedSlices(rows, indices, value.dense_shape)

    def _number_of_replicas(self) -> int:
        return self._ranks.size

    @_collective_call
    def all_reduce(self, op: Op, values: list[Any], options: CommunicationOptions, form: Hashable = None) -> list[Any]:
        """Combine plain values of this replica through the hooks. Strategies call this method.

        ``form`` is the form of the structure whose leaves the values are. The ranks compare it.
        """
        self._compare(op, form, values, options)
        pairs = [(PerReplica((value,)), value) for value in values]
        if not pairs:
            return []
        if len(pairs) == 1:
            return [component(self.reduce_implementation(op, *pairs[0], options))]
        return [component(result) for result in self.batch_reduce_implementation(op, pairs, options)]

    def all_reduce_arrays(
        self, op: Op, values: list[np.ndarray], options: CommunicationOptions, form: Hashable
    ) -> list[Any]:
        """Do what `all_reduce` does, for NumPy arrays, at least one. The caller has looked at their types."""
        return self.all_reduce(op, values, options, form)


def check_destinations(destinations: Any) -> None:
    """Raise ValueError unless a name is that of a device, and TypeError for anything but a variable or value."""
    if isinstance(destinations, str):
        if not destinations:
            raise ValueError("destinations must not be empty: name a device or give a variable")
        Device.parse(destinations)
    elif not (
        hasattr(destinations, "dtype")  # arrays of any library, and variables
        or isinstance(destinations, (DistributedValues, Device, bool, int, float, complex))
    ):
        raise TypeError(f"destinations must be a variable, a value or the name of a device, not {destinations!r}")


def mirrored(value: Any) -> Mirrored:
    return value if isinstance(value, Mirrored) else Mirrored((component(value),))


def _per_replica(op: Op, value: Any) -> DistributedValues:
    checked = reducible(op, value)
    return value if isinstance(value, (Mirrored, PerReplica)) else PerReplica((checked,))
