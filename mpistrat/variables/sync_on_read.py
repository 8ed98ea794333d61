"""Variables that every replica writes for itself, combined when they are read."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.collectives.movement import any_library
from mpistrat.collectives.operations import divide
from mpistrat.runtime.agreement.collective_lock import collective_call
from mpistrat.values import PerReplica, ReduceOp, VariableAggregation, component
from mpistrat.values.array_like import READING
from mpistrat.variables.local import LocalVariable
from mpistrat.variables.mirrored import DistributedVariable, ranks_of
from mpistrat.variables.variable import Variable

_collective_call = collective_call(ranks_of)


class SyncOnReadVariable(DistributedVariable):
    """A variable with a value of its own on each replica, for what is counted locally and read seldom.

    Reading it in cross-replica context is collective: all replicas must. `repr`, `shape`, `dtype`, `len` and
    hashing never communicate.
    """

    @_collective_call
    def _read(self) -> np.ndarray:
        if self._is_own():
            return self.own_copy()
        engine, array = self._engine, self.own_copy()  # of the first replica of this rank
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            self._agree_on_variable("read")
            return any_library.broadcasted(engine.topology, array)
        if self._aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"variable {self.name!r} has aggregation NONE: its copies do not become one value; read it in "
                "strategy.run, or by strategy.experimental_local_results"
            )
        op = ReduceOp.from_variable_aggregation(self._aggregation)
        self._agree_on_variable("read")
        return engine.all_reduce(op, [_contribution(self)])[0]

    def _update_in_replica(self, method: str, value: Any) -> None:
        self._component.write(method, value)

    @_collective_call
    def _update_across_replicas(self, method: str, value: Any) -> None:
        if method.startswith("scatter"):
            raise ValueError(
                f"variable {self.name!r}: {method} of a sync-on-read variable writes one replica's copy: call it in "
                "strategy.run"
            )
        value = value._read() if isinstance(value, DistributedVariable) else component(value)
        if self._aggregation is VariableAggregation.SUM:
            if method != "assign":
                raise ValueError(
                    f"variable {self.name!r}: {method} in cross-replica context would count once per replica: "
                    "call it in strategy.run, or assign the sum"
                )
            # A read adds up the copies: each gets a share of the sum.
            value = _share(self._component.fitting(value), self._strategy.num_replicas_in_sync, self.dtype)
        for copy in self.values:
            copy.write(method, value)


# These read the variable and then do more: an interrupt after the read leaves the rank a call behind.
_CALLS = (
    *("read_value", "numpy", "sparse_read", "gather_nd", "_item", "__setitem__", "__iter__"),
    *("__array__", "__array_ufunc__", "__float__", "__int__", "__complex__", "__bool__", "__index__"),
    *READING,
)
for _name in _CALLS:
    setattr(SyncOnReadVariable, _name, _collective_call(getattr(SyncOnReadVariable, _name)))


class SyncOnReadOfReplicas(SyncOnReadVariable):
    """A variable with a value of its own on each replica of a rank."""

    _components: tuple[LocalVariable, ...]

    @property
    def values(self) -> tuple[LocalVariable, ...]:
        """Copies of this process, in the order of replicas."""
        return self._components

    @property
    def _component(self) -> LocalVariable:
        """The copy of the current replica; outside of replicas the first one, for its shape and dtype."""
        replica = None if context.is_default() else context.current().replica_context
        return self._components[0 if replica is None else replica.number_here]

    @_component.setter
    def _component(self, first: LocalVariable) -> None:
        replicas = self._engine.replicas
        others = [LocalVariable.copy_of(self, first.array.copy(), weakref.ref(self), i) for i in replicas.local[1:]]
        self._components = (first, *others)

    def own_copies(self) -> list[np.ndarray]:
        return [copy.array for copy in self._components]

    def _hold_copy_of(self, variable: Any) -> None:
        self._components = tuple(copy.copied_for(weakref.ref(self)) for copy in variable.values)


def read_together(variables: Sequence[Variable]) -> list[np.ndarray]:
    """Return the values of variables. Sums over the replicas of one strategy travel in one message."""
    first = variables[0]
    if isinstance(first, SyncOnReadVariable) and all(_is_summed(variable, first) for variable in variables):
        engine = first.distribute_strategy.extended.engine
        return engine.all_reduce(ReduceOp.SUM, [*map(_contribution, variables)])
    return [variable.read_value() for variable in variables]


def _contribution(variable: Variable) -> Any:
    """Return this rank's copy or copies, to be reduced over the replicas."""
    copies = variable.own_copies()
    return copies[0] if len(copies) == 1 else PerReplica(copies)


def _is_summed(variable: Variable, first: SyncOnReadVariable) -> bool:
    """Return whether a read now sums a variable over the replicas of ``first``."""
    return (
        isinstance(variable, SyncOnReadVariable)
        and variable._aggregation is VariableAggregation.SUM
        and variable._engine is first._engine
        and not variable._engine.topology.compares_variables
        and not variable._is_own()
    )


def _share(value: np.ndarray, replicas: int, dtype: np.dtype) -> np.ndarray:
    """Return the share of a sum that each replica holds. Integers are rounded towards zero."""
    if value.dtype.kind not in "iu" or dtype.kind not in "iu":
        return divide(value, replicas).astype(dtype)
    # `//` rounds down: a negative quotient with a remainder is one too low.
    floor = value // replicas
    return (floor + ((value < 0) & (value % replicas != 0))).astype(dtype)
