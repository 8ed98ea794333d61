"""The coordinator of asynchronous training."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpistrat import nest
from mpistrat.asynchronous.dispatcher import Dispatcher, Task, dispatcher_of
from mpistrat.asynchronous.on_worker import (
    CancelledError,
    KeptOnWorkers,
    PerWorkerIterator,
    PerWorkerValue,
    RemoteValue,
    ScheduledValue,
)
from mpistrat.asynchronous.statistics import CallsBar, Statistics
from mpistrat.data import Dataset
from mpistrat.messages.mailbox import SentFunction
from mpistrat.messages.pickling import Packed, is_plain, pack, pack_arguments, refer, refuse
from mpistrat.strategies.parameter_server import DatasetOfWorkers, ParameterServerStrategy

_LONGEST_QUEUE = 262_144  # as in tf.distribute
_keys = itertools.count()


class ClusterCoordinator:
    """Sends functions to the workers of a strategy, and collects their results.

    There is one for each strategy. It makes progress in its own calls, and in calls of its values: a program that
    computes for long on the coordinator calls `done` now and then.

    Parameters
    ----------
    strategy : ParameterServerStrategy
    progress : bool
        Whether to show a bar until `join` returns: how many of the calls have ended. ``MPISTRAT_PROGRESS=0`` turns it
        off. The strategy's first coordinator decides.
    exactly_once : bool
        Whether the writes of a scheduled function to variables count once, also if it runs again because its worker
        was lost. They are kept on the worker while it runs, where its own reads see them. When it has ended they are
        applied by all parameter servers, or by none if the function failed. `StrategyExtended.update` returns None
        in such a function: its function runs later.

    Raises
    ------
    ValueError
        If ``strategy`` is another strategy, or has a coordinator with another ``exactly_once``.

    Examples
    --------
    On the chief of a program with workers and parameter servers:

    >>> coordinator = ClusterCoordinator(ParameterServerStrategy(resolver))  # doctest: +SKIP
    >>> values = [coordinator.schedule(pow, args=(n, 2)) for n in range(4)]  # doctest: +SKIP
    >>> coordinator.join()  # doctest: +SKIP
    >>> coordinator.fetch(values)  # doctest: +SKIP
    [0, 1, 4, 9]
    """

    def __new__(
        cls, strategy: ParameterServerStrategy, progress: bool = False, *, exactly_once: bool = False
    ) -> ClusterCoordinator:
        if not isinstance(strategy, ParameterServerStrategy):
            raise ValueError(f"a ClusterCoordinator needs a ParameterServerStrategy, not {strategy!r}")
        return strategy.coordinator or object.__new__(cls)

    def __init__(self, strategy: ParameterServerStrategy, progress: bool = False, *, exactly_once: bool = False):
        if strategy.coordinator is self:  # from __new__: Python calls __init__ on it again
            if exactly_once and not self._exactly_once:
                raise ValueError(
                    "the strategy has a coordinator already, made without exactly_once: give exactly_once=True at first"
                )
            return
        self._strategy = strategy
        self._exactly_once = bool(exactly_once)
        self._number = strategy.number
        self._workers = len(strategy.contact.roles.workers)
        self._functions = strategy.contact.functions
        self._tasks = dispatcher_of(strategy.contact)
        self._error: BaseException | None = None
        self._bar = CallsBar(progress)
        strategy.coordinator = self

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    @property
    def exactly_once(self) -> bool:
        """Whether the writes of a function that runs again count once."""
        return self._exactly_once

    @property
    def _dispatcher(self) -> Dispatcher:
        if self._strategy.cluster_resolver is None:
            raise RuntimeError(
                f"{self._strategy.contact.role} runs a function that uses the coordinator: only the chief's program "
                "schedules and fetches"
            )
        return self._tasks

    def __reduce__(self) -> Any:
        if not refer(self):
            refuse("a ClusterCoordinator")
        return ClusterCoordinator, (self._strategy,)

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> RemoteValue:
        """Queue a function for any worker, and return at once.

        Functions begin in the order in which they are scheduled. The function is sent by value, once to each worker:
        it captures the values of its first scheduling. Variables, strategies, coordinators and per-worker
        values are sent as references. While 262,144 functions are queued, this waits.

        Parameters
        ----------
        fn : callable
            Runs on a worker, in the scope of the strategy.
        args : list or tuple, optional
        kwargs : dict, optional
            The function gets its worker's part of a `PerWorkerValue` among the arguments.

        Returns
        -------
        RemoteValue

        Raises
        ------
        TypeError
            If ``fn`` is not callable, ``args`` is not a list or tuple, or a part of them cannot be sent.
        ValueError
            If a RemoteValue is among the arguments: fetch it, and pass its value.
        Exception
            The error of a function that failed before. All that was queued is then cancelled, also this call.
        """
        if not callable(fn):
            raise TypeError(f"schedule takes a function, not {fn!r}")
        if args is not None and not isinstance(args, (list, tuple)):
            raise TypeError(f"args must be a list or a tuple of arguments, not {args!r}")
        call = (tuple(args or ()), kwargs or {})
        self._check(call)
        function = self._functions.packed(fn)
        arguments, references = pack_arguments(*call)
        self._raise_kept()
        dispatcher = self._dispatcher
        if dispatcher.queued >= _LONGEST_QUEUE:
            dispatcher.wait(lambda: dispatcher.queued < _LONGEST_QUEUE)
            self._raise_kept()
        self._bar.queued()
        value = ScheduledValue(dispatcher.wait)
        dispatcher.add(self._task(function, arguments, (fn, references), value))
        return value

    def _check(self, call: Any) -> None:
        if is_plain(call):
            return
        leaves, _ = nest.flatten(call)
        for leaf in leaves:
            if isinstance(leaf, RemoteValue):
                raise ValueError(
                    "a RemoteValue is among the arguments: workers do not see each other; fetch it, and pass its value"
                )
            if isinstance(leaf, PerWorkerValue):
                leaf.check(self._workers)

    def _task(self, function: SentFunction, arguments: Packed, kept: Any, value: ScheduledValue) -> Task:
        def ended(result: Any, error: BaseException | None) -> None:
            value.end(result, error)
            self._bar.ended()
            if error is not None and self._error is None and not isinstance(error, CancelledError):
                self._error = error

        return Task(function, arguments, self._number, self, (kept, self._strategy), ended, once=self._exactly_once)

    def _raise_kept(self) -> None:
        """Raise the first error of a function, if one failed. Nothing is queued or running when it is raised."""
        if self._error is None:
            return
        self._dispatcher.cancel_queued(self, lambda: CancelledError("another function failed before this one began"))
        self._wait_for_all()
        error, self._error = self._error, None
        raise error.with_traceback(None)

    def _wait_for_all(self) -> None:
        self._dispatcher.wait(lambda: not self._dispatcher.unfinished(self))

    def join(self) -> None:
        """Wait until all scheduled functions have ended.

        Raises
        ------
        Exception
            The first error of a function, once. What was queued is then cancelled, and nothing is running.
        """
        try:
            self._dispatcher.wait(lambda: self._error is not None or not self._dispatcher.unfinished(self))
            self._raise_kept()
        finally:
            self._bar.close()

    def done(self) -> bool:
        """Return whether all scheduled functions have ended.

        Raises
        ------
        Exception
            As `join`.
        """
        self._dispatcher.progress()
        self._raise_kept()
        return not self._dispatcher.unfinished(self)

    def statistics(self) -> Statistics:
        """Return what the workers have done, as of the last call that made progress."""
        return self._dispatcher.statistics()

    def fetch(self, val: Any) -> Any:
        """Wait for the RemoteValues of a structure, and return it with their results in their place.

        Raises
        ------
        Exception
            The error of a function among them.
        """
        return nest.map_structure(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    def create_per_worker_dataset(self, dataset_fn: Dataset | DatasetOfWorkers | Callable[[], Any]) -> PerWorkerDataset:
        """Build a dataset on every worker.

        Every worker reads all data: divide it by `experimental_get_current_worker_index` if each should read a part.

        Parameters
        ----------
        dataset_fn : callable, Dataset, or result of a strategy's distribute method
            A callable runs on each worker.

        Returns
        -------
        PerWorkerDataset
            ``iter`` of it gives a `PerWorkerValue` for scheduled functions, which call ``next`` on it.

        Raises
        ------
        ValueError
            If ``dataset_fn`` is something else.
        """
        if isinstance(dataset_fn, (Dataset, DatasetOfWorkers)):
            dataset = dataset_fn
            return PerWorkerDataset(self, lambda: dataset)
        if not callable(dataset_fn):
            raise ValueError(f"dataset_fn must be a function or a dataset, not {dataset_fn!r}")
        return PerWorkerDataset(self, dataset_fn)

    def create_per_worker_resource(self, fn: Callable[[], Any]) -> PerWorkerValue:
        """Call a function on every worker, and keep its results there.

        Functions that get the value among their arguments see the object of their worker. If ``fn`` fails, they
        raise its error.

        Raises
        ------
        TypeError
            If ``fn`` is not callable, or cannot be sent.
        """
        if not callable(fn):
            raise TypeError(f"create_per_worker_resource takes a function, not {fn!r}")
        return self.make_parts(fn, (), KeptOnWorkers)

    def make_parts(self, fn: Callable[..., Any], args: tuple[Any, ...], kind: type[KeptOnWorkers]) -> KeptOnWorkers:
        """Return a value of class ``kind`` whose part on each worker is the result of ``fn(*args)``."""
        function = self._functions.packed(fn)
        arguments, references = pack(args, copy=True)
        key = next(_keys)
        # The function first: messages to a rank arrive in order, and the next one names the function by its digest.
        for rank in self.strategy.contact.roles.workers:
            self._functions.send(rank, function)
        self._dispatcher.send_to_workers("part", (key, function.digest, self._number), arguments)
        return kind(key, self._dispatcher.freed, (fn, function.references, references))


class PerWorkerDataset:
    """A dataset on every worker, where ``dataset_fn`` returns it.

    `ClusterCoordinator.create_per_worker_dataset` makes it.
    """

    def __init__(self, coordinator: ClusterCoordinator, dataset_fn: Callable[[], Any]):
        self._coordinator = coordinator
        self._parts = coordinator.make_parts(_dataset, (dataset_fn,), KeptOnWorkers)

    def __iter__(self) -> PerWorkerIterator:
        iterator = self._coordinator.make_parts(iter, (self._parts,), PerWorkerIterator)
        assert isinstance(iterator, PerWorkerIterator)
        return iterator


def _dataset(dataset_fn: Callable[[], Any]) -> Iterable[Any]:
    dataset = dataset_fn()
    if not isinstance(dataset, (Dataset, DatasetOfWorkers)):
        raise TypeError(f"dataset_fn must return a Dataset, not {dataset!r}")
    return dataset
