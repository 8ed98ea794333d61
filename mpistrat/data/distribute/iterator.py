"""Iterator of one pass over a distributed dataset."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from mpistrat import context
from mpistrat.data.distribute.on_device import fetched, handed_over
from mpistrat.data.distribute.passes import Passes
from mpistrat.data.distribute.throughput_log import ThroughputLog
from mpistrat.data.pipeline.optional import NextAsOptional
from mpistrat.data.pipeline.prefetch import Prefetched
from mpistrat.runtime.record import flight_record
from mpistrat.runtime.record.layout import Phase

if TYPE_CHECKING:
    from mpistrat.runtime.device import Device


class DistributedIterator(NextAsOptional):
    """This replica's batches of one epoch. Made by ``iter()`` of a distributed dataset.

    Every replica makes the same number of steps. A replica without rows in a step gets an empty batch.
    Replicas may be at different steps, because reading does not communicate (except for datasets made of an
    iterable). A thread reads the next batches meanwhile and ends with the iterator (`Dataset.prefetch`).

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
        self._ahead: Iterator[list[Any]] | None = None
        self._read_ahead: deque[Any] = deque()
        self._pace: ThroughputLog | None = None
        self._ended = False

    def __iter__(self) -> DistributedIterator:
        return self

    def get_next(self) -> Any:
        """Return the next batch of this replica.

        Returns
        -------
        nested structure of arrays

        Raises
        ------
        StopIteration
            After the last step, which is the same on all replicas.
        ValueError
            If called inside a replica function.
        """
        modes = context.local.stack
        if modes and modes[-1].replica_context is not None:
            raise ValueError(
                "next(iterator) should be called from outside of replica_fn: take the batch before "
                "strategy.run(fn, args=(batch,)) and pass it as an argument"
            )
        if self._ended:
            raise StopIteration
        if self._pace is None:
            self._pace = self._passes.pace()
        began = time.perf_counter()
        if self._read_ahead:
            batch = handed_over(self._read_ahead.popleft(), self._passes.device)
        else:
            try:
                with flight_record.phase(Phase.INPUT):
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
            if isinstance(self._ahead, Prefetched):
                self._passes.in_line = self._ahead.in_line
            self._ahead = None
            raise StopIteration
        device = self._passes.device
        if not self._passes.prefetch or division.communicates:
            return handed_over(fetched(division.batch(step, epoch), device), device)
        if self._ahead is None or (isinstance(self._ahead, Prefetched) and not self._ahead.usable):
            most, together = division.ahead(self._passes.prefetch, device.kind)
            self._ahead = batches = division.batches(step, epoch, together)
            if device.kind != "cpu":
                batches = map(partial(_all_fetched, device=device), batches)
            if most:
                self._ahead = Prefetched(batches, most, self._passes.in_line, self._passes.making)
        try:
            self._read_ahead.extend(next(self._ahead))
        except BaseException:
            self._ahead = None
            raise
        return handed_over(self._read_ahead.popleft(), device)

    __next__ = get_next

    def state(self) -> dict[str, Any]:
        """Return the position in the epoch: a small dict that JSON can hold.

        Save the state with the weights, and give it to `restore` in the job that continues. It holds the
        seeds, which files there were, and which rows all replicas together have got. Under
        AutoShardPolicy.DATA it is equal on all replicas that have made the same number of steps.

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
        """Continue at a saved position; the next iterator of the dataset begins the epoch after that.

        Under AutoShardPolicy.DATA the rest of the epoch follows, each row once. The number of replicas and the
        batch size may differ from those of the saved run. They must be the same under the other policies, and
        where another transform than ``map`` follows ``batch``. The call does not communicate: give the same
        state to all replicas. With ``distribute_datasets_from_function`` give each replica its own state.

        Parameters
        ----------
        state : dict
            What `state` returned.

        Raises
        ------
        TypeError
            If ``state`` is not a state.
        ValueError
            If the state is of other files (the message names them), other transforms, other seeds or another
            policy. If it cannot be continued with this number of replicas or batch size. If an epoch does not
            have such a position.
        """
        self._passes.restore(state)
        self._begin()

    @property
    def element_spec(self) -> Any:
        """Structure of a batch, as `DistributedDataset.element_spec`."""
        return self._passes.element_spec


def _all_fetched(batches: list[Any], device: Device) -> list[Any]:
    return [fetched(each, device) for each in batches]
