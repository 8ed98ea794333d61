"""What variables with a copy on every replica have in common."""

from __future__ import annotations

import enum
import weakref
from abc import abstractmethod
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.collectives.broadcast import broadcast
from mpistrat.values import DistributedValues
from mpistrat.variables.local import LocalVariable
from mpistrat.variables.variable import Variable


class Place(enum.Enum):
    """Where code stands, as a variable sees it."""

    CROSS_REPLICA = enum.auto()
    REPLICA = enum.auto()
    UPDATE = enum.auto()
    ELSEWHERE = enum.auto()


class DistributedVariable(Variable, DistributedValues):
    """A variable with one copy per replica; this process holds one of them."""

    _component: LocalVariable

    def _initialize(self, value: np.ndarray) -> None:
        extended = self._strategy.extended
        details = (self._name, self._trainable, self._synchronization.name, self._aggregation.name)
        (value,) = broadcast(extended._topology, [value], "of the variable", *details)
        self._component = LocalVariable.copy_of(self, value, weakref.ref(self), extended._topology.rank)

    def _place(self) -> Place:
        mode = context.current()
        if mode.strategy is not self._strategy:
            return Place.CROSS_REPLICA if context.is_default() else Place.ELSEWHERE
        if mode.replica_context is not None:
            return Place.REPLICA
        return Place.CROSS_REPLICA if mode.update_replica_id is None else Place.UPDATE

    def _update(self, method: str, value: Any) -> None:
        match self._place():
            case Place.REPLICA:
                self._update_in_replica(method, value)
            case Place.UPDATE:
                self._component._update(method, value)
            case Place.CROSS_REPLICA:
                self._update_across_replicas(method, value)
            case Place.ELSEWHERE:
                raise RuntimeError(
                    f"variable {self.name!r} belongs to {self._strategy!r}, and {context.current().strategy!r} is "
                    "current: write it in its own strategy's scope, or in none"
                )

    @abstractmethod
    def _update_in_replica(self, method: str, value: Any) -> None: ...

    @abstractmethod
    def _update_across_replicas(self, method: str, value: Any) -> None: ...

    def _own_copy(self) -> np.ndarray:
        return self._component._array

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise NotImplementedError(
            f"variable {self.name!r} cannot be copied: create another in its strategy's scope from read_value()"
        )
