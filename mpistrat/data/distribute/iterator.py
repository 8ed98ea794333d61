"""Iteration over the batches of this rank: their copies to a GPU, their throughput, and the iterator."""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpistrat import context, nest
from mpistrat.arrays.device import Device, on_device
from mpistrat.arrays.gpu.pinned import Sent, feed, received
from mpistrat.data.distribute.state import Passes, state_of
from mpistrat.data.pipeline.optional import Element, NextAsOptional
from mpistrat.data.pipeline.prefetch import Prefetched
from mpistrat.process.own_files import level_of_program
from mpistrat.record import flight_record
from mpistrat.record.layout import Phase
from mpistrat.runtime.agreement.operation import call_site
from mpistrat.values import PerReplica

if TYPE_CHECKING:
    from mpistrat.runtime.topology import Topology

_log = logging.getLogger("mpistrat.data")
_KINDS = "biufc"  # of the arrays that CuPy has; others stay on the host
_EXTENSION_DTYPES = ("bfloat16",)


class ThroughputLog:
    """A counter of the samples and bytes of an iterator, and of the time that the program waits for them.

    Each rank that shows INFO logs a line for each epoch. The figures are not collected: a rank may leave its loop
    early, and a message that no rank receives would outlive a communicator that the program frees.
    """

    def __init__(self, ranks: Topology):
        self._ranks = ranks
        self._start = time.perf_counter()
        self._waited = 0.0
        self._samples = self._bytes = 0

    def got(self, batch: Any, waited: float) -> None:
        """Count a batch for which the program waited ``waited`` seconds."""
        self._waited += waited
        leaves: Any = batch if type(batch) is tuple else batch.values() if type(batch) is dict else (batch,)
        nbytes, length = 0, -1
        for leaf in leaves:  # one loop without a call of ours: a third of the Python of a small batch was spent here
            if type(leaf) is not np.ndarray:
                self._got_nested(batch)
                return
            nbytes += leaf.nbytes
            if length < 0:
                length = len(leaf) if leaf.ndim else 1
        self._samples += length if length >= 0 else 1
        self._bytes += nbytes

    def _got_nested(self, batch: Any) -> None:
        """Count a batch of any structure."""
        leaves: Any = nest.flatten(batch)[0]
        if leaves and type(leaves[0]) is PerReplica:
            for of_replica in zip(*(leaf.values for leaf in leaves), strict=True):
                self.got(of_replica, 0.0)
            return
        self._samples += len(leaves[0]) if leaves and getattr(leaves[0], "ndim", 0) else 1
        for array in leaves:
            self._bytes += getattr(array, "nbytes", 0)

    def ended(self, epoch: int) -> None:
        """Log the throughput of an epoch that this rank has ended."""
        seconds = max(time.perf_counter() - self._start, 1e-9)  # an epoch without batches may take no time
        _log.info(
            "epoch %d%s: %d samples in %.2f s, %s samples/s, %.3f GB/s, %.1f%% of the time waiting for data",
            *(epoch, f" of rank {self._ranks.rank}" if self._ranks.size > 1 else "", self._samples, seconds),
            *(f"{self._samples / seconds:,.0f}", self._bytes / seconds / 1e9, 100 * self._waited / seconds),
        )


class PendingCopy(NamedTuple):
    """A batch that is being copied to a GPU. ``leaves`` has None for each array that is copied."""

    leaves: list[Any]
    rebuild: Callable[[list[Any]], Any]
    sent: Sent


def fetched(batch: Any, device: Device) -> Any:
    """Start the copy of a batch to a device, and return it for `wait_for_copy`; on the host, return the batch."""
    if device.kind == "cpu":
        return batch
    leaves, rebuild = _by_replica(batch)
    copied = [leaf for leaf in leaves if _is_copied(leaf)]
    # By a stream of its own, beside the kernels of the program.
    with feed(device.index) as stream:
        sent = stream.send(copied)
    return PendingCopy([None if _is_copied(leaf) else leaf for leaf in leaves], rebuild, sent)


def wait_for_copy(batch: Any, device: Device) -> Any:
    """Return a batch that was fetched, ready for the caller's stream; on a GPU its arrays are CuPy arrays."""
    if device.kind == "cpu":
        return batch
    arrived = iter(received(batch.sent))
    return batch.rebuild([next(arrived) if leaf is None else leaf for leaf in batch.leaves])


def _by_replica(batch: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of a batch, replica by replica, and the function that builds the batch from them."""
    leaves, rebuild = nest.flatten(batch)
    if not leaves or type(leaves[0]) is not PerReplica:
        return leaves, rebuild
    number = len(leaves)
    of_replicas = [*chain(*zip(*(leaf.values for leaf in leaves), strict=True))]
    return of_replicas, lambda flat: rebuild([PerReplica(flat[k::number]) for k in range(number)])


def _is_copied(value: Any) -> bool:
    return type(value) is np.ndarray and (value.dtype.kind in _KINDS or value.dtype.name in _EXTENSION_DTYPES)


class DistributedIterator(NextAsOptional[Element]):
    """The batches of one epoch on this rank. Made by ``iter()`` of a distributed dataset.

    Where a rank plays several replicas, and with virtual replicas, the leaves of a batch are PerReplica values. Every
    replica makes the same number of steps. A replica without rows in a step gets an empty batch. Ranks may be at
    different steps, because reading does not communicate (except for datasets made of an iterable). A thread reads the
    next batches meanwhile and ends with the iterator (`Dataset.prefetch`).

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
        self._passes, self._line = passes, call_site()
        self._begin()

    def _begin(self) -> None:
        self._position = self._passes.begin(self._line)
        self._saved_step: int | None = None
        self._ahead: Iterator[list[Any]] | None = None
        self._read_ahead: deque[Any] = deque()
        self._throughput: ThroughputLog | None = None
        self._ended = False

    def __iter__(self) -> DistributedIterator[Element]:
        return self

    def get_next(self) -> Element:
        """Return the next batch.

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
        if self._throughput is None:
            self._throughput = ThroughputLog(self._passes.ranks)
        began = time.perf_counter()
        if self._read_ahead:
            batch = wait_for_copy(self._read_ahead.popleft(), self._passes.device)
        else:
            try:
                with flight_record.phase(Phase.INPUT):
                    batch = self._read()
            except StopIteration:
                self._ended = self._position.ended = True
                self._throughput.ended(self._position.epoch)
                raise
        self._throughput.got(batch, time.perf_counter() - began)
        self._position.step += 1
        return batch

    def _read(self) -> Any:
        division, epoch, step = self._position.division, self._position.epoch, self._position.step
        if division.steps is not None and step >= division.steps:
            # The next epoch begins as this one ended, with the thread or without.
            if isinstance(self._ahead, Prefetched):
                self._passes.in_line = self._ahead.in_line
            self._ahead = None
            raise StopIteration
        device = self._passes.device
        # A stream needs a collective at each step, which no other thread may make.
        if not self._passes.prefetch or division.communicates:
            return wait_for_copy(fetched(division.batch(step, epoch), device), device)
        # A forked child has no thread: it begins a new one at this step.
        if self._ahead is None or (isinstance(self._ahead, Prefetched) and not self._ahead.usable):
            most, together = division.prefetch_sizes(self._passes.prefetch, device.kind)
            self._ahead = batches = division.batches(step, epoch, together)
            if device.kind != "cpu":
                batches = _all_fetched(iter(batches), device)
            # Otherwise the program makes its batches itself, without a thread.
            if most:
                self._ahead = Prefetched(batches, most, self._passes.in_line, self._passes.making)
        try:
            self._read_ahead.extend(next(self._ahead))
        except BaseException:
            self._ahead = None  # the next call begins again at this step
            raise
        return wait_for_copy(self._read_ahead.popleft(), device)

    __next__ = get_next

    def state(self) -> dict[str, Any]:
        """Return the position in the epoch: a small dict that JSON can hold.

        Save the state with the weights, and give it to `restore` in the job that continues. It holds the
        seeds, which files there were, and which rows all replicas together have got. Under
        AutoShardPolicy.AUTO and DATA it is equal on all replicas that have made the same number of steps.

        An iterator is of one epoch. If it has ended, and the dataset has a younger one, this returns the state of the
        younger, with a warning: save `DistributedDataset.state` instead.

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
        passes, position = self._passes, self._position
        newest = passes.newest
        if newest is not None and newest is not position and (position.ended or position.step == self._saved_step):
            if passes.division.replicas.is_chief:
                why = (
                    "has ended, and the place of the younger is saved"
                    if position.ended
                    else "has not moved since the last save"
                )
                warnings.warn(
                    f"an iterator is saved that was made{position.line}, while its dataset has a younger one, made"
                    f"{newest.line}: the older {why}; give the checkpoint the distributed dataset in place of an "
                    "iterator, as in Checkpoint(batches=distributed)",
                    stacklevel=level_of_program(),
                )
            if position.ended:
                return passes.state()
        self._saved_step = position.step
        return state_of(passes.division, position)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position; the next iterator of the dataset begins the epoch after that.

        Under AutoShardPolicy.AUTO and DATA the rest of the epoch follows, each row once. The number of replicas and the
        batch size may differ from those of the saved run. They must be the same under the other policies, and
        where another transform than ``map`` follows ``batch``. The call does not communicate: give the same
        state to all replicas. With ``distribute_datasets_from_function`` give each rank its own state, or any
        with virtual replicas.

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


def _all_fetched(batches: Iterator[list[Any]], device: Device) -> Iterator[list[Any]]:
    while True:
        with on_device(device.index):  # for the program's functions, too: this thread may be a new one
            try:
                copies = [fetched(batch, device) for batch in next(batches)]
            except StopIteration:
                return
        yield copies
