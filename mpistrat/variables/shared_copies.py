"""Mirrored variables with one copy for several replicas: for all replicas of a rank, or for all ranks of a node."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import arrays
from mpistrat.collectives import structures
from mpistrat.memory.node import NoSharedMemoryError, share
from mpistrat.runtime.agreement.collective_lock import collective_call
from mpistrat.runtime.agreement.operation import operation
from mpistrat.values import IndexedSlices, PerReplica, snapshot
from mpistrat.variables.local import LocalVariable, kind_on
from mpistrat.variables.mirrored import MirroredVariable, ranks_of
from mpistrat.variables.variable import operand


class MirroredOfReplicas(MirroredVariable):
    """A variable with one copy for all replicas of a rank. Their values are combined and written once."""

    def _update_in_replica(self, method: str, value: Any) -> None:
        context.current().replica_context.meet(method, lambda: _WriteCall(self, method), (self, value))

    def write_of_all(self, method: str, values: list[Any]) -> None:
        """Combine the values of all replicas, given the values of this rank's, and write the result. Collective."""
        op = self._reduction
        if op is None:  # the value of the first replica, or an error
            self._write_equal(method, self._combined(method, values[0]))
            return
        if isinstance(values[0], IndexedSlices):
            self._require_rows_of_a_reduction(method, op)
        else:
            values = [self._contribution(op, value) for value in values]
        self._write_equal(method, self._engine.all_reduce(op, [PerReplica(values)])[0])


class _WriteCall:
    """A write by the replicas of a rank to the variable of the first one."""

    def __init__(self, variable: MirroredOfReplicas, method: str):
        self._variable, self._method = variable, method
        self._values: list[Any] = []

    def give(self, operands: tuple[MirroredOfReplicas, Any]) -> None:
        variable, value = operands
        if variable is not self._variable:
            raise ValueError(
                f"a replica calls {self._method} of variable {variable.name!r}, and the first one of its rank that of "
                f"{self._variable.name!r}"
            )
        # A copy: the next replica of the rank may reuse the memory before the write.
        self._values.append(snapshot(operand(variable._reduction, value)))

    def make(self) -> list[None]:
        self._variable.write_of_all(self._method, self._values)
        return [None] * len(self._values)


class CentralVariable(MirroredVariable):
    """A variable that the ranks of a node have once. All read the same memory, and rank 0 writes it.

    What replicas assign is combined first. Every write is collective, also in cross-replica context: no rank reads
    while rank 0 writes. ON_READ is the same as ON_WRITE.
    """

    each_replica_writes = False

    def _component_with(self, value: np.ndarray) -> LocalVariable:
        engine, device = self._engine, self._engine.variable_device
        container = weakref.ref(self)
        if engine.replicas.size == 1:
            return kind_on(device).copy_of(self, arrays.placed(value, device), container, 0)
        memory = self._shared_like(value)
        engine.topology.on_first(partial(np.copyto, memory, value))
        # All ranks map the same pages: a stray write of another rank raises.
        memory.flags.writeable = engine.replicas.is_chief
        return LocalVariable.copy_of(self, memory, container, 0)

    def _shared_like(self, value: np.ndarray) -> np.ndarray:
        topology = self._engine.topology
        problem: NoSharedMemoryError | None = None
        with topology.lock.collective(operation("a central variable", (value.dtype, value.shape), *self._rules())):
            try:
                memory = share(topology.node, 0, max(value.nbytes, 1)).common  # a file of 0 bytes cannot be mapped
            except NoSharedMemoryError as error:
                problem = error
        if problem is not None:  # after the lock is released: all ranks raise, and stay in step
            raise MemoryError(f"variable {self.name!r} of {value.nbytes} bytes: {problem}")
        return memory[: value.nbytes].view(value.dtype).reshape(value.shape)

    @property
    def device(self) -> str:
        """The device that holds the variable: the strategy's parameter device."""
        return str(arrays.device_of(self._component.array))

    def _update_in_replica(self, method: str, value: Any) -> None:
        if self._reduction is None and self._engine.replicas.size == 1:
            self._write_equal(method, self._equal_on_all(value))
        else:
            super()._update_in_replica(method, value)

    def _contribution(self, op: Any, value: Any) -> Any:
        return super()._contribution(op, arrays.to_host(value) if arrays.on_gpu(value) else value)

    @collective_call(ranks_of)
    def _update_across_replicas(self, method: str, value: Any) -> None:
        with structures.refusals(method, self._engine.topology):
            value = self._equal_on_all(value)
            if isinstance(value, IndexedSlices):
                self.check_rows(value)
            else:
                value = self._component.fitting(value)  # raises on all ranks, before rank 0 writes
        self._write_equal(method, value)

    def _write_equal(self, method: str, value: Any) -> None:
        """Write on rank 0, while the other ranks wait."""
        compared = operation(f"{method} of a variable", self._name)
        self._engine.topology.on_first(partial(self._component.write, method, value), compared)

    def after_local_write(self, method: str) -> None:
        """Do nothing: there are no copies that could differ."""

    @collective_call(ranks_of)
    def _hold_copy_of(self, variable: CentralVariable) -> None:  # type: ignore[override]
        """Copy the value to memory of its own. Collective."""
        self._component = self._component_with(variable.own_copy().copy())
