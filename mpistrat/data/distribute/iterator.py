"""One pass over a distributed dataset."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from mpistrat import context
from mpistrat.data.distribute.on_device import fetched, handed_over
from mpistrat.data.distribute.passes import Passes
from mpistrat.data.distribute.throughput_log import ThroughputLog
from mpistrat.data.pipeline.optional import NextAsOptional
from mpistrat.data.pipeline.prefetch import Prefetched

if TYPE_CHECKING:
    from mpistrat.runtime.device import Device


class DistributedIterator(NextAsOptional):
    """This replica's batches of one epoch. Made by ``iter()`` of a distributed dataset.

    Every replica makes the same number of steps; one without rows in a step gets an empty batch. Reading
    communicates nothing, so replicas may be at different steps. The next batches are read meanwhile, by
    a thread that ends with the iterator (`Dataset.prefetch`).

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> dataset = mpistrat.data.Dataset.range(6).batch(4)
    >>> iterator = iter(strategy.experimental_distribute_dataset(dataset))
    >>> iterator.get_next(), next(iterator)
    (array([0, 1, 2, 3]), array([4, 5]))
    >>> iterator.get_next_as_optional().has_value()
    False
    """

    def __init__(self, passes: Passes):
        self._passes = passes
        self._begin()

    def _begin(self) -> None:
        self._place = self._passes.begin()
        self._ahead: Prefetched | None = None
        self._read_ahead: deque[Any] = deque()
        self._pace: ThroughputLog | None = None
        self._ended = False

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        return self.get_next()

    def get_next(self) -> Any:
        """The next batch of this replica.

        Returns
        -------
        nested structure of arrays

        Raises
        ------
        StopIteration
            After the last step, on every replica at the same one.
        ValueError
            If called inside a replica function.
        """
        _refuse_replica_context()
        if self._ended:
            raise StopIteration
        if self._pace is None:
            self._pace = self._passes.pace()
        began = time.perf_counter()
        try:
            batch = self._read()
        except StopIteration:
            self._ended = True
            self._pace.ended(self._place.position.epoch)
            raise
        self._pace.got(batch, time.perf_counter() - began)
        self._place.step += 1
        return batch

    def _read(self) -> Any:
        division, epoch, step = self._place.position.division, self._place.position.epoch, self._place.step
        if division.steps is not None and step >= division.steps:
            if self._ahead is not None:
                self._passes.at_once = self._ahead.at_once
            self._ahead = None
            raise StopIteration
        device = self._passes.device
        if not self._passes.prefetch or division.communicates:
            return handed_over(fetched(division.batch(step, epoch), device), device)
        if self._read_ahead:
            return handed_over(self._read_ahead.popleft(), device)
        if self._ahead is None or not self._ahead.usable:
            most, together = division.ahead(self._passes.prefetch)
            batches = division.batches(step, epoch, together)
            if device.kind != "cpu":
                batches = map(partial(_all_fetched, device=device), batches)
            self._ahead = Prefetched(batches, most, self._passes.at_once, self._passes.turns)
        try:
            self._read_ahead.extend(next(self._ahead))
        except BaseException:
            self._ahead = None
            raise
        return handed_over(self._read_ahead.popleft(), device)

    def state(self) -> dict[str, Any]:
        """How far the epoch has come: a small dict of what JSON can hold.

        Save it beside the weights, and give it to `restore` in the job that goes on with them. It tells which
        rows all replicas together have got (under AutoShardPolicy.DATA, where it is the same on every
        replica that has made as many steps), the seeds, and which files there were.

        Returns
        -------
        dict

        Examples
        --------
        >>> import mpistrat
        >>> dataset = mpistrat.data.Dataset.range(6).batch(2)
        >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
        >>> iterator = iter(strategy.experimental_distribute_dataset(dataset))
        >>> next(iterator)
        array([0, 1])
        >>> state = iterator.state()
        >>> again = iter(strategy.experimental_distribute_dataset(dataset))
        >>> again.restore(state)
        >>> list(again)
        [array([2, 3]), array([4, 5])]
        """
        return self._passes.state_at(self._place.now())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken; the next iterator of the dataset begins the epoch after that.

        Under AutoShardPolicy.DATA exactly the rows that are left of the epoch come, each once, also with
        another number of replicas or another batch size. Under the other policies, and where something
        else than ``map`` follows ``batch``, both must be what they were. Nothing is communicated: give
        the same state to all replicas. (Those of ``distribute_datasets_from_function`` are each
        replica's own.)

        Parameters
        ----------
        state : dict
            From `state`.

        Raises
        ------
        TypeError
            If it is no state.
        ValueError
            If it is one of other files (which are named), other transforms, other seeds, another policy, or of
            a number of replicas or a batch size with which it cannot be continued; if an epoch has no such place.
        """
        self._passes.restore(state)
        self._begin()

    @property
    def element_spec(self) -> Any:
        """The structure of a batch, as of the dataset."""
        return self._passes.element_spec


def _all_fetched(batches: list[Any], device: Device) -> list[Any]:
    return [fetched(each, device) for each in batches]


def _refuse_replica_context() -> None:
    if not context.is_default() and context.current().replica_context is not None:
        raise ValueError(
            "next(iterator) should be called from outside of replica_fn: take the batch before "
            "strategy.run(fn, args=(batch,)) and pass it as an argument"
        )
