"""The strategy whose variables are on parameter servers."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NoReturn

from mpistrat import cluster_resolver as resolvers
from mpistrat import context
from mpistrat.cluster_resolver.roles import CHIEF, PARAMETER_SERVER, WORKER
from mpistrat.data import Dataset, InputContext, InputOptions
from mpistrat.messages import contact
from mpistrat.messages.pickling import refer, refuse
from mpistrat.process.cache import Cache
from mpistrat.strategies.placed import Partitioner, PlacingExtended, ServingExtended
from mpistrat.strategy import RunOptions, Strategy

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
        if not isinstance(dataset, Dataset):
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
        Strategy.__init__(strategy, ServingExtended(strategy, reached))
        _known[number] = _copies.keep(number, strategy)
    return strategy


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
