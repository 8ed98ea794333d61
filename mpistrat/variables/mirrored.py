"""Variables with a copy on every replica: their base class, and those whose copies are equal at all times."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrat import context, verify
from mpistrat.arrays import arrays
from mpistrat.collectives import structures
from mpistrat.collectives.movement import any_library
from mpistrat.collectives.movement.moves import broadcast
from mpistrat.collectives.operations import has_mean
from mpistrat.runtime.agreement.collective_lock import collective_call
from mpistrat.runtime.agreement.operation import MismatchError, operation
from mpistrat.values import (
    DistributedValues,
    IndexedSlices,
    Mirrored,
    PerReplica,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
    component,
)
from mpistrat.variables.local import LocalVariable, kind_on, placed_beside
from mpistrat.variables.variable import Variable, operand

ranks_of = attrgetter("_engine.topology")  # of the ranks that hold copies of a variable


class DistributedVariable(Variable, DistributedValues):
    """A variable with one copy per replica. This process holds one copy."""

    _component: LocalVariable

    @property
    def values(self) -> tuple[LocalVariable, ...]:
        """Copies of this process."""
        return (self._component,)

    @collective_call(ranks_of)
    def _initialize(self, value: np.ndarray) -> None:
        self._component = self._component_with(value)
        self._number = self._engine.topology.lock.sequence  # equal on all ranks: creation is collective

    def _component_with(self, value: np.ndarray) -> LocalVariable:
        """Return this replica's copy, with the value of replica 0. Collective."""
        engine = self._engine
        if engine.sends_initial_values:
            (value,) = broadcast(engine.with_equal_start, [value], "of the variable", *self._rules())
        device = engine.variable_device
        array = arrays.placed(value, device)
        if device.kind == "cpu" and self._synchronization is VariableSynchronization.ON_WRITE:
            array = placed_beside(array, self._trainable)
        return kind_on(device).copy_of(self, array, weakref.ref(self), engine.replicas.first)

    def _rules(self) -> tuple[Hashable, ...]:
        """Return the facts that must be equal on all ranks that create the variable, beside dtype and shape."""
        return self._name, self._trainable, self._synchronization.name, self._aggregation.name

    def _agree_on_variable(self, method: str) -> None:
        """In debug mode, raise on every replica if replicas write different variables. Collective in debug mode."""
        topology = self._engine.topology
        if topology.compares_variables:
            topology.lock.compare(
                operation(f"{method} of a variable", self._name, f"created in collective number {self._number}")
            )

    def _is_own(self) -> bool:
        """Return whether the current context is a replica context or an update context of this variable's strategy."""
        mode = context.current()
        return mode.strategy is self._strategy and (
            mode.replica_context is not None or mode.update_replica_id is not None
        )

    def write(self, method: str, value: Any) -> None:
        stack = context.local.stack  # without a call, which takes 60 ns
        mode = stack[-1] if stack else context.current()
        if mode.strategy is self._strategy:
            if mode.replica_context is not None:
                self._update_in_replica(method, value)
            elif mode.update_replica_id is not None:
                self._component.write(method, value)
            else:
                self._update_across_replicas(method, value)
        else:
            self._require_own_strategy("write")
            self._update_across_replicas(method, value)

    @abstractmethod
    def _update_in_replica(self, method: str, value: Any) -> None: ...

    @abstractmethod
    def _update_across_replicas(self, method: str, value: Any) -> None: ...

    def own_copy(self) -> np.ndarray:
        return self._component.array

    def _hold_copy_of(self, variable: DistributedVariable) -> None:
        self._component = variable._component.copied_for(weakref.ref(self))


# --- mirrored variables ---------------------------------------------------------


# A sum of rows keeps rows of equal index apart. To add or multiply them one by one is well defined; a smallest, largest
# or new value would be the value of one replica.
_NOT_OF_REDUCED_ROWS = ("scatter_min", "scatter_max", "scatter_update")
_MEAN = ReduceOp.MEAN  # Python 3.11 takes 110 ns to find a member of an enumeration
_REDUCTIONS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}


class MirroredVariable(DistributedVariable, Mirrored):
    """A variable that every write reaches on all replicas.

    What the replicas assign is combined first, as the aggregation says, and then written to each copy. In
    cross-replica context this rank's value is written without communication: it must be equal on all.
    """

    _described: tuple[Any, Any] = (None, None)  # the array whose `__array_struct__` is known, and that

    def _initialize(self, value: np.ndarray) -> None:
        super()._initialize(value)
        self._reduction = _REDUCTIONS.get(self._aggregation)
        if self.each_replica_writes:
            verify.register(self._engine.topology, self)

    def _read(self) -> np.ndarray:
        return self._component.array

    @property
    def __array_struct__(self) -> Any:
        """The memory of the variable, read-only: NumPy asks for it before ``__array__``, and it is made once.

        Without it, `Mirrored.__getattr__` takes more time than the conversion (2.5 us instead of 0.9).
        """
        array = self._component.array
        described, struct = self._described
        if described is array:
            return struct
        if type(array) is np.ndarray and array.dtype.isbuiltin == 1 and array.dtype.kind in "biufc":
            view = array.view()
            view.flags.writeable = False
            struct = view.__array_struct__
            self._described = array, struct
            return struct
        raise AttributeError("__array_struct__")  # it cannot describe bfloat16, and none is on the host

    @property
    def __cupy_get_ndarray__(self) -> Callable[[], Any]:
        """On a GPU, CuPy's functions take a variable as the array that it is."""
        component: Any = self._component
        return component.__cupy_get_ndarray__

    def _update_in_replica(self, method: str, value: Any) -> None:
        engine, op, target = self._engine, self._reduction, self._component.array
        topology = engine.topology
        sequence = topology.lock.sequence
        try:  # as `collective_call`, under the name of the method
            # Fast path: such an array is reduced as it is. All checks of `_combined` take 0.3 us of 5 for it.
            if (
                type(value) is np.ndarray
                and op is not None
                and type(target) is np.ndarray
                and value.dtype is target.dtype
                and value.shape == target.shape
                # A view may lie in a buffer, which would be reduced in place.
                and value.base is None
                and not topology.compares_variables
                and (op is not _MEAN or has_mean(target.dtype))
            ):
                value = engine.ops.all_reduce(op, [value], engine.options)[0]
            else:
                value = self._combined(method, value)
            self._write_equal(method, value)
        except MismatchError:
            raise
        except BaseException as error:
            topology.lock.left_call(method, error, sequence)
            raise

    def _combined(self, method: str, value: Any) -> Any:
        """Combine the replicas' values by the aggregation of the variable."""
        engine, op, target = self._engine, self._reduction, self._component.array
        if engine.topology.compares_variables:
            self._agree_on_variable(method)
        suits = type(value) is type(target) and value.dtype is target.dtype and value.shape == target.shape
        if op is None and self._aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
            raise ValueError(
                f"variable {self.name!r}: {method} in a replica context needs to know how the replicas' values "
                "become one: create it with aggregation=VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
            )
        if isinstance(value, DistributedValues):
            with structures.refusals(method, engine.topology):
                value = operand(op, value)
        if isinstance(value, IndexedSlices):
            return self._combined_rows(method, op, value)
        if not suits or (op is _MEAN and not has_mean(target.dtype)):
            with structures.refusals(method, engine.topology):
                value = self._contribution(op, value)
        if op is None:
            return any_library.broadcasted(engine.topology, value)
        if value.base is not None and id(value.base) in engine.arenas:
            value = value.copy()  # a buffer would be reduced where it is
        return engine.all_reduce(op, [value])[0]

    def _write_equal(self, method: str, value: Any) -> None:
        """Write a value that is equal on all replicas."""
        self._component.write(method, value)

    def _contribution(self, op: ReduceOp | None, value: Any) -> Any:
        """Return this replica's value to reduce, as an array of the variable's shape."""
        value = self._component.fitting(value)
        if op is ReduceOp.MEAN and not has_mean(value.dtype):
            raise ValueError(f"variable {self.name!r}: MEAN needs floating point or complex values, not {value.dtype}")
        return value

    def _write_result(self, result: Any) -> None:
        self._refuse_sum_of_wholes()
        super()._write_result(result)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse_sum_of_wholes()
        super().__setitem__(key, value)

    def _refuse_sum_of_wholes(self) -> None:
        """Raise ValueError where whole values, written in place, would be added up over the replicas."""
        mode = context.current()
        if self._reduction is ReduceOp.SUM and mode.replica_context and mode.strategy is self._strategy:
            raise ValueError(
                f"variable {self.name!r}: its aggregation is SUM, which in a replica context would add up what an "
                "in-place operation leaves unchanged, too: give what is to be added to assign_add, assign_sub or "
                "scatter_add"
            )

    def _combined_rows(self, method: str, op: ReduceOp | None, rows: IndexedSlices) -> IndexedSlices:
        engine = self._engine
        if op is not None:
            with structures.refusals(method, engine.topology):
                self._require_rows_of_a_reduction(method, op)
            return engine.all_reduce(op, [rows])[0]
        topology = engine.topology
        # As objects: the other ranks do not know how many rows replica 0 has.
        values, indices = topology.broadcast_object((arrays.to_host(rows.values), arrays.to_host(rows.indices)))
        return IndexedSlices(values, indices, rows.dense_shape)

    def _require_rows_of_a_reduction(self, method: str, op: ReduceOp) -> None:
        if method in _NOT_OF_REDUCED_ROWS:
            raise NotImplementedError(
                f"variable {self.name!r}: the {op.name} of what replicas give {method} has no meaning; use "
                "aggregation ONLY_FIRST_REPLICA"
            )

    @collective_call(ranks_of)
    def _update_across_replicas(self, method: str, value: Any) -> None:
        self._write_equal(method, self._equal_on_all(value))
        self.assignments += method == "assign"
        self.after_local_write(method)

    def _equal_on_all(self, value: Any) -> Any:
        """Return the plain value that is given in cross-replica context."""
        if isinstance(value, PerReplica):
            raise ValueError(
                f"variable {self.name!r}: a PerReplica value differs between replicas, and the copies of a mirrored "
                "variable must not: reduce it first, or assign in strategy.run"
            )
        return value._read() if isinstance(value, DistributedVariable) else component(value)

    def after_local_write(self, method: str) -> None:
        """In debug mode: raise on every replica if this write made the copies different. Collective then."""
        topology, replicas = self._engine.topology, self._engine.replicas
        if not topology.compares_variables:
            return
        self._agree_on_variable(method)
        array = self.own_copy()
        checksums = topology.all_gather_object(verify.digest(arrays.to_host(array).tobytes()))
        if len(set(checksums)) > 1:
            # The value of most ranks is taken to be the right one.
            usual = max(checksums, key=checksums.count)
            others = [rank for rank, checksum in enumerate(checksums) if checksum != usual]
            raise RuntimeError(
                f"replica {replicas.first}: variable {self.name!r} differs between replicas after {method}: ranks "
                f"{others} hold another value than the rest; reduce or broadcast values before they are written"
            )
