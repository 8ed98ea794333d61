"""The base class of variables with a copy on every replica."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Hashable
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import arrays
from mpistrat.collectives.movement.broadcast import broadcast
from mpistrat.runtime.agreement.collective_call import collective_call
from mpistrat.runtime.agreement.operation import operation
from mpistrat.values import DistributedValues, VariableSynchronization
from mpistrat.variables.local import LocalVariable, placed_beside
from mpistrat.variables.on_gpu import kind_on
from mpistrat.variables.variable import Variable

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
        mine = arrays.placed(value, device)
        if device.kind == "cpu" and self._synchronization is VariableSynchronization.ON_WRITE:
            mine = placed_beside(mine, self._trainable)
        return kind_on(device).copy_of(self, mine, weakref.ref(self), engine.replicas.first)

    def _rules(self) -> tuple[Hashable, ...]:
        """Return what must be equal on all ranks that create the variable, beside dtype and shape."""
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
