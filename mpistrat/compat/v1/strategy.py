"""The strategies with the methods of version 1, and the iterators that a program starts and advances by calls."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mpistrat import strategies
from mpistrat import strategy as v2
from mpistrat.data import Dataset, InputContext, InputReplicationMode
from mpistrat.strategy.former import warn
from mpistrat.values import ReduceOp


def get_loss_reduction() -> ReduceOp:
    """Return the reduction of losses outside of Estimators: always SUM.

    Examples
    --------
    >>> get_loss_reduction().name
    'SUM'
    """
    return ReduceOp.SUM


class InputIterator:
    """An iterator over a distributed dataset that can be started again.

    Parameters
    ----------
    dataset : DistributedDataset or Dataset
        Dataset to iterate over.

    Examples
    --------
    >>> iterator = InputIterator([1, 2])
    >>> _ = iterator.get_next(), iterator.initialize()
    >>> iterator.get_next()
    1
    """

    def __init__(self, dataset: Iterable[Any]):
        self._dataset = dataset
        self._iterator = iter(dataset)

    def initialize(self) -> list[Any]:
        """Start a new epoch. Return an empty list: no operations are left to run."""
        self._iterator = iter(self._dataset)
        return []

    @property
    def initializer(self) -> list[Any]:
        """Result of `initialize`. Reading it starts a new epoch."""
        return self.initialize()

    def get_next(self) -> Any:
        """Return the next batch.

        Raises
        ------
        StopIteration
            At the end of the epoch.
        """
        return next(self._iterator)

    def __iter__(self) -> Iterator[Any]:
        return self

    __next__ = get_next


class Strategy(v2.Strategy):
    """`mpistrat.Strategy` with the methods that only version 1 had.

    Parameters
    ----------
    extended : StrategyExtended
        Lower-level part of the strategy, see `mpistrat.StrategyExtended`.

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.compat.v1.OneDeviceStrategy("cpu:0")
    >>> float(strategy.reduce("SUM", 2.0))
    2.0
    """

    def reduce(  # type: ignore[override]  # its default is another
        self, reduce_op: ReduceOp | str, value: Any, axis: int | tuple[int, ...] | None = None
    ) -> Any:
        """Return the reduction of a value, as `mpistrat.Strategy.reduce`; here ``axis`` has a default. Collective."""
        return super().reduce(reduce_op, value, axis)

    def make_dataset_iterator(self, dataset: Dataset) -> InputIterator:
        """Return an iterator over the dataset as `experimental_distribute_dataset` distributes it. Collective.

        Raises
        ------
        ValueError, RuntimeError
            As `experimental_distribute_dataset`.
        """
        return InputIterator(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Dataset | Callable[[], Any]],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """Return an iterator over the per-replica batches that ``input_fn(InputContext)`` makes. Collective.

        Parameters
        ----------
        input_fn : callable
            Returns a Dataset, or a function without arguments that returns the next batch. The replicas do not
            compare the results of such functions, nor their ends.
        replication_mode : InputReplicationMode
            Only PER_WORKER.

        Raises
        ------
        ValueError
            For a replication mode other than PER_WORKER.
        TypeError
            On every replica, if ``input_fn`` returned something else on a replica, or a Dataset on some replicas and a
            function on others.
        RuntimeError
            As `distribute_datasets_from_function`.
        """
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(f"Input replication mode not supported: {replication_mode!r}; use PER_WORKER")
        functions: list[Callable[[], Any]] = []

        def dataset_fn(context: InputContext) -> Any:
            result = input_fn(context)
            if isinstance(result, Dataset) or not callable(result):
                return result
            functions.append(result)
            return Dataset.range(1).batch(1)  # a placeholder, equal on all replicas, for their comparison

        distributed = self.distribute_datasets_from_function(dataset_fn)
        if self.agree(not functions):
            return InputIterator(distributed)
        if not self.agree(bool(functions)):
            raise TypeError("input_fn returned a Dataset on some ranks and a function on others: return the same kind")
        return InputIterator(itertools.starmap(functions[0], itertools.repeat(())))  # calls it for each batch

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Dataset:
        """Return a dataset over arrays in memory. ``session`` is ignored."""
        return self.extended.experimental_make_numpy_dataset(numpy_input, session)

    def experimental_run(self, fn: Callable[..., Any], input_iterator: InputIterator | None = None) -> Any:
        """Run a function on the next batch of an iterator. Deprecated: use `run`."""
        warn("experimental_run", "run")
        return self.run(fn) if input_iterator is None else self.run(fn, args=(input_iterator.get_next(),))

    def update_config_proto(self, config_proto: Any) -> Any:
        """Return a copy of a session's configuration, without changes."""
        return copy.deepcopy(config_proto)


class MirroredStrategy(strategies.MirroredStrategy, Strategy):
    """`mpistrat.MirroredStrategy` with the methods of version 1.

    Examples
    --------
    >>> MirroredStrategy().num_replicas_in_sync
    1
    """


class OneDeviceStrategy(strategies.OneDeviceStrategy, Strategy):
    """`mpistrat.OneDeviceStrategy` with the methods of version 1.

    Examples
    --------
    >>> OneDeviceStrategy("cpu:0").num_replicas_in_sync
    1
    """
