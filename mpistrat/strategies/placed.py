"""The part of a strategy that places variables on parameter servers: on the rank that creates them, and on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from mpistrat import context
from mpistrat.cluster_resolver.roles import PARAMETER_SERVER
from mpistrat.messages.contact import Contact
from mpistrat.messages.servers import NoServers, Servers
from mpistrat.strategy import Strategy, StrategyExtended
from mpistrat.strategy.extended import UpdateCall
from mpistrat.strategy.replica_context import components
from mpistrat.values import Mirrored, VariableSynchronization, component
from mpistrat.variables import Variable
from mpistrat.variables.on_server import ServerVariable, read_all, update_all
from mpistrat.variables.partitioners import shards_wanted

Partitioner = Callable[..., Any]


class PlacedExtended(StrategyExtended):
    """The common part of the ranks that create variables and of the ranks that serve them."""

    servers: Servers | NoServers

    def __init__(self, strategy: Strategy, reached: Contact):
        super().__init__(strategy)
        self.contact = reached

    def __reduce__(self) -> Any:
        return attrgetter("extended"), (self._strategy,)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The parameter servers."""
        return tuple(f"/job:ps/task:{i}" for i in range(len(self.contact.roles.parameter_servers)))

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Run ``fn(variable, *args, **kwargs)`` on the parameter server that holds a variable.

        No other write to the variable happens meanwhile. ``fn`` is sent. Among the arguments may be variables of the
        same parameter server. For a sharded variable ``fn`` runs once for each shard: arguments with the shape of the
        variable, and rows of it, are cut. Raise as `StrategyExtended.update`, TypeError also if ``fn`` or an argument
        cannot be sent, and ValueError if a variable among the arguments is on another parameter server.
        """
        self.check_variable(var, "update")
        if context.current().replica_context is not self.replica_context:
            context.require_cross_replica(self._strategy, "update", "")
        if isinstance(var, ServerVariable):
            result = var.update(fn, tuple(map(component, args)), components(kwargs) if kwargs else {})
        else:  # on the parameter server already
            return self.update_non_slot(None, fn, (var, *args), kwargs, group)
        return Mirrored((result,)) if group else (result,)

    def batch_read(self, variables: Sequence[Variable]) -> list[np.ndarray]:
        """Return copies of the values of variables, with one message to each parameter server.

        Each parameter server answers at one moment: of its variables the values belong together. Raise as `read_var`.
        """
        variables = list(variables)
        for variable in variables:
            self.check_variable(variable, "batch_read")
        return read_all(variables) if _on_servers(variables) else super().batch_read(variables)

    def batch_update(self, calls: Sequence[UpdateCall], group: bool = True) -> list[Any]:
        """Run functions beside the variables that they update, with one message to each parameter server.

        Each call is (variable, function, args), and ``group`` is as in `update`. Raise as `update`. If a function
        fails, the others run all the same.
        """
        calls = list(calls)
        for variable, _, _ in calls:
            self.check_variable(variable, "batch_update")
        # On a parameter server an update function has the arrays themselves.
        if not _on_servers([variable for variable, _, _ in calls]):
            return super().batch_update(calls, group)
        if context.current().replica_context is not self.replica_context:
            context.require_cross_replica(self._strategy, "batch_update", "")
        results = update_all([(var, fn, tuple(map(component, args))) for var, fn, args in calls])
        return [Mirrored((result,)) if group else (result,) for result in results]


class PlacingExtended(PlacedExtended):
    """The part of a strategy that creates variables and chooses their parameter servers."""

    servers: Servers

    def __init__(self, strategy: Strategy, reached: Contact, partitioner: Partitioner | None = None):
        super().__init__(strategy, reached)
        self.servers = Servers(reached)
        self._partitioner = partitioner
        self._placed = 0
        self._colocated: ServerVariable | None = None

    def variable_class(self, synchronization: VariableSynchronization) -> type[Variable]:
        return ServerVariable

    def colocate_vars_with(self, colocate_with_variable: Variable) -> AbstractContextManager[None]:
        """Return a context in which new variables live on a variable's parameter server.

        They are not sharded and not counted, unless the variable is sharded: then a new variable with as many rows is
        sharded in the same way. Raise as `StrategyExtended.colocate_vars_with`.
        """
        context.require_scope(self._strategy)
        self.check_variable(colocate_with_variable, "colocate_vars_with")
        return self._colocating(colocate_with_variable)

    @contextmanager
    def _colocating(self, variable: Any) -> Iterator[None]:
        before, self._colocated = self._colocated, variable
        try:
            yield
        finally:
            self._colocated = before

    def create(self, variable: ServerVariable, value: np.ndarray) -> None:
        """Put a new variable, or a shard, on its parameter server."""
        self.servers.ask(variable.server, "create", (variable.key, 1), (variable, value))

    def placement(self, shape: tuple[int, ...], dtype: np.dtype) -> list[int]:
        """Return the parameter servers of a new variable: one for each shard, or one if it is not divided."""
        beside = self._colocated
        if beside is not None:
            alike = shape[:1] == beside.shape[:1]
            return [shard.server for shard in beside.shards] if alike else [beside.server]
        number = 1 if self._partitioner is None else shards_wanted(self._partitioner, shape, dtype)
        # In turn over all servers, as in TensorFlow.
        servers = [(self._placed + i) % self.servers.number for i in range(number)]
        self._placed += number
        return servers


def _on_servers(variables: Sequence[Variable]) -> bool:
    """Return whether the values of these variables must be asked for, and are not held by this parameter server."""
    return bool(variables) and all(isinstance(variable, ServerVariable) for variable in variables)


class ServingExtended(PlacedExtended):
    """The extended of a worker or parameter server: it reads and writes variables, and creates none."""

    def __init__(self, strategy: Strategy, reached: Contact):
        super().__init__(strategy, reached)
        job, _ = reached.roles.task_of(reached.mailbox.rank)
        self.servers = NoServers() if job == PARAMETER_SERVER else Servers(reached)

    def variable_class(self, synchronization: VariableSynchronization) -> NoReturn:
        """Raise ValueError: only the coordinator creates variables."""
        raise ValueError(
            "a scheduled function creates a variable: create it on the coordinator, in strategy.scope(). For the state "
            "of an optimizer, call optimizer.build(variables) there"
        )
