"""The strategy whose variables are on parameter servers."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from mpistrat import cluster_resolver as resolvers
from mpistrat import context, data
from mpistrat.cluster_resolver.roles import CHIEF, PARAMETER_SERVER, WORKER
from mpistrat.data import Dataset, InputContext, InputOptions
from mpistrat.messages import contact
from mpistrat.messages.contact import Contact
from mpistrat.messages.pickling import refer, refuse
from mpistrat.messages.servers import NoServers, Servers
from mpistrat.process.cache import Cache
from mpistrat.strategy import RunOptions, Strategy, StrategyExtended
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


# --- the strategy of a coordinator ----------------------------------------------


_log = logging.getLogger(__name__)
_numbers = itertools.count()  # equal on all ranks that construct strategies: these construct the same ones
_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by number, on this rank
_copies = Cache[int, Strategy](64)  # on a worker, which does not learn when the coordinator drops its own


class SentByNumber:
    """A strategy that is sent as a number, by which other ranks find their own."""

    number: int

    def __reduce__(self) -> Any:
        # In a message it is a number. Elsewhere, as in a file, it cannot be pickled.
        if not refer(self):
            refuse(repr(self))
        return strategy_of, (self.number,)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ValueError("ParameterServerStrategy cannot be copied: create another on the same ranks")


class ParameterServerStrategy(SentByNumber, Strategy):
    """Asynchronous training: variables on parameter servers, and functions that any worker runs.

    The coordinator constructs it. Workers and parameter servers are in `mpistrat.Server.join` instead. The functions
    are scheduled by `mpistrat.coordinator.ClusterCoordinator`.

    Parameters
    ----------
    cluster_resolver : ClusterResolver
        The rank of each task: one chief, which is the coordinator, and at least one worker and one parameter server.
    variable_partitioner : callable, optional
        Called with ``shape`` and ``dtype`` of each new variable with axes. Returns the number of parts for each axis;
        only the first may be above 1.

    Raises
    ------
    ValueError
        If the cluster has other jobs than chief, worker and ps, or not the tasks that are needed.
    RuntimeError
        On a worker or a parameter server. On every rank, if the ranks contradict each other about roles.
    TimeoutError
        If a rank is not in ``Server.join()`` within ``mpistrat.rc.contact_seconds``.

    Examples
    --------
    On the chief, while the other ranks are in `mpistrat.Server.join`:

    >>> jobs = {"chief": 1, "worker": 2, "ps": 1}
    >>> resolver = mpistrat.cluster_resolver.MpiClusterResolver(jobs=jobs)  # doctest: +SKIP
    >>> with ParameterServerStrategy(resolver).scope():  # doctest: +SKIP
    ...     weights = mpistrat.Variable([1.0, 2.0])
    """

    coordinator: Any = None  # its ClusterCoordinator, which lives as long as the strategy

    def __init__(self, cluster_resolver: resolvers.ClusterResolver, variable_partitioner: Partitioner | None = None):
        if not isinstance(cluster_resolver, resolvers.ClusterResolver):
            raise TypeError(f"cluster_resolver must be a ClusterResolver object, not {cluster_resolver!r}")
        _check_jobs(cluster_resolver)
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise TypeError(f"variable_partitioner must be callable, not {variable_partitioner!r}")
        if cluster_resolver.task_type in (WORKER, PARAMETER_SERVER):
            refuse_to_serve(cluster_resolver, "the chief")
        self._resolver: resolvers.ClusterResolver | None = cluster_resolver
        reached = contact.reach_all(cluster_resolver)
        self.contact = reached
        super().__init__(PlacingExtended(self, reached, variable_partitioner))
        self.number = number_of(self)

    @property
    def cluster_resolver(self) -> resolvers.ClusterResolver | None:
        """The resolver that the strategy was given; None on a worker."""
        return self._resolver

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Run a function in a replica context on this rank.

        In a scheduled function this rank is the worker. On the coordinator nothing is distributed, which is logged.
        """
        if self._resolver is not None:
            _warn_of_local_run()
        return super().run(fn, args, kwargs, options)

    def experimental_distribute_dataset(  # type: ignore[override]
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DatasetOfWorkers:
        """Return the dataset for `ClusterCoordinator.create_per_worker_dataset`: every worker reads all of it.

        Raises
        ------
        TypeError
            If ``dataset`` is not a Dataset.
        """
        context.require_cross_replica(self, "experimental_distribute_dataset", "call it before run")
        if not isinstance(dataset, Dataset):
            raise TypeError(f"dataset must be a Dataset, not {dataset!r}")
        return DatasetOfWorkers(self, lambda: dataset)

    def distribute_datasets_from_function(  # type: ignore[override]
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> DatasetOfWorkers:
        """Return the dataset that ``dataset_fn(InputContext)`` makes on each worker."""
        context.require_cross_replica(self, "distribute_datasets_from_function", "call it before run")
        return DatasetOfWorkers(self, lambda: dataset_fn(InputContext()))


def refuse_to_serve(resolver: resolvers.ClusterResolver, whose: str) -> NoReturn:
    """Raise the RuntimeError of a rank that constructs the strategy and should serve it."""
    raise RuntimeError(
        f"{resolver.task_type} {resolver.task_id} constructs ParameterServerStrategy, which belongs to {whose}: call "
        "mpistrat.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join() "
        "instead"
    )


class DatasetOfWorkers:
    """A dataset of which every worker reads all elements.

    ``dataset_fn`` returns it, on the worker. Iterating over it on the coordinator raises ValueError.
    """

    def __init__(self, strategy: ParameterServerStrategy, dataset_fn: Callable[[], Dataset]):
        self._strategy, self._dataset_fn = strategy, dataset_fn

    def __iter__(self) -> Iterator[Any]:
        if self._strategy.cluster_resolver is not None:
            raise ValueError(
                "a dataset of ParameterServerStrategy is read on the workers: give it to "
                "ClusterCoordinator.create_per_worker_dataset, and pass the iterator to scheduled functions"
            )
        dataset = self._dataset_fn()
        if not isinstance(dataset, data.Dataset):
            raise TypeError(f"dataset_fn must return a Dataset, not {dataset!r}")
        return iter(dataset)


def number_of(strategy: Strategy) -> int:
    """Return the number of a new strategy. Other ranks refer to it by this number."""
    number = next(_numbers)
    _known[number] = strategy
    return number


def strategy_of(number: int) -> Any:
    """Return the strategy of a number, as this rank has it."""
    strategy = _known.get(number)
    if strategy is None:
        reached = contact.here()
        assert reached is not None
        # Without the constructor, which is the coordinator's: it reaches all ranks.
        strategy = object.__new__(ParameterServerStrategy)
        strategy.number, strategy._resolver, strategy.contact = number, None, reached
        Strategy.__init__(strategy, _ServingExtended(strategy, reached))
        _known[number] = _copies.keep(number, strategy)
    return strategy


class _ServingExtended(PlacedExtended):
    def __init__(self, strategy: ParameterServerStrategy, reached: Contact):
        super().__init__(strategy, reached)
        job, _ = reached.roles.task_of(reached.mailbox.rank)
        self.servers = NoServers() if job == PARAMETER_SERVER else Servers(reached)

    def variable_class(self, synchronization: VariableSynchronization) -> NoReturn:
        """Raise ValueError: only the coordinator creates variables."""
        raise ValueError(
            "a scheduled function creates a variable: create it on the coordinator, in strategy.scope(). For the state "
            "of an optimizer, call optimizer.build(variables) there"
        )


def tasks_of_jobs(resolver: resolvers.ClusterResolver) -> tuple[dict[str, int], str]:
    """Return the number of tasks of each job, and the jobs as text. Raise ValueError for a job of another kind."""
    tasks = {job: len(numbers) for job, numbers in resolver.tasks().items()}
    jobs = ", ".join(f"{job}={number}" for job, number in tasks.items()) or "no jobs"
    others = sorted({*tasks} - {CHIEF, WORKER, PARAMETER_SERVER})
    if others:
        raise ValueError(f"a job is chief, worker or ps, not {', '.join(others)}; the cluster has {jobs}")
    return tasks, jobs


def _check_jobs(resolver: resolvers.ClusterResolver) -> None:
    tasks, jobs = tasks_of_jobs(resolver)
    if tasks.get(CHIEF, 0) != 1:
        raise ValueError(f"the cluster needs one chief, the coordinator; it has {jobs}")
    for job in (WORKER, PARAMETER_SERVER):
        if not tasks.get(job):
            raise ValueError(f"the cluster needs a {job}; it has {jobs}")


@cache
def _warn_of_local_run() -> None:
    _log.warning(
        "strategy.run on the coordinator runs on this rank, not on the workers: schedule it by ClusterCoordinator"
    )
