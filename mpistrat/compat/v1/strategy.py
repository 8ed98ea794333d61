"""Strategy as version 1 had it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from mpistrat import strategy as v2
from mpistrat.compat.v1.iterator import Calls, InputIterator
from mpistrat.data import Dataset, InputContext, InputReplicationMode
from mpistrat.strategy.deprecated import warn
from mpistrat.values import ReduceOp


class Strategy(v2.Strategy):
    """`mpistrat.Strategy` with the methods that only version 1 had.

    Parameters
    ----------
    extended : StrategyExtended

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.compat.v1.OneDeviceStrategy("cpu:0")
    >>> float(strategy.reduce("SUM", 2.0))
    2.0
    """

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | tuple[int, ...] | None = None) -> Any:
        """As `mpistrat.Strategy.reduce`, where ``axis`` has no default."""
        return super().reduce(reduce_op, value, axis)

    def make_dataset_iterator(self, dataset: Dataset) -> InputIterator:
        """An iterator over the dataset, spread as by `experimental_distribute_dataset`. Collective.

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
        """An iterator over the per-replica batches that ``input_fn(InputContext)`` makes. Collective.

        Parameters
        ----------
        input_fn : callable
            Returns a Dataset, or a function without arguments that returns the next batch. The replicas do not
            compare what such functions return, nor when they end.
        replication_mode : InputReplicationMode

        Raises
        ------
        ValueError
            For a replication mode other than PER_WORKER.
        TypeError
            On every replica, if one of them got neither, or some got a Dataset and others a function.
        RuntimeError
            As `distribute_datasets_from_function`.
        """
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(f"Input replication mode not supported: {replication_mode!r}; use PER_WORKER")
        functions: list[Callable[[], Any]] = []

        def dataset_fn(context: InputContext) -> Any:
            made = input_fn(context)
            if isinstance(made, Dataset) or not callable(made):
                return made
            functions.append(made)
            return Dataset.range(1).batch(1)  # in its place while the replicas compare theirs

        distributed = self.distribute_datasets_from_function(dataset_fn)
        if self.agree(not functions):
            return InputIterator(distributed)
        if not self.agree(bool(functions)):
            raise TypeError(
                "input_fn returned a Dataset on some ranks and a function on others: return the same kind on all"
            )
        return InputIterator(Calls(functions[0]))

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Dataset:
        """A dataset over arrays in memory. There are no sessions."""
        return self.extended.experimental_make_numpy_dataset(numpy_input, session)

    def experimental_run(self, fn: Callable[..., Any], input_iterator: InputIterator | None = None) -> Any:
        """Former way to run a function on the next batch of an iterator."""
        warn("experimental_run", "run")
        return self.run(fn) if input_iterator is None else self.run(fn, args=(input_iterator.get_next(),))

    def update_config_proto(self, config_proto: Any) -> Any:
        """A copy of a session's configuration, which needs no change here."""
        return copy.deepcopy(config_proto)
