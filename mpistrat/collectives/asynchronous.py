"""All-reduces that run while the program computes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from mpistrat.collectives import structures
from mpistrat.collectives.algorithms.choose import Choice
from mpistrat.collectives.algorithms.mpi import mpi_operation
from mpistrat.collectives.operations import Op, finish, result_dtype
from mpistrat.collectives.reduction import (
    Key,
    Message,
    Reduction,
    Steps,
    joined,
    packed_for_host,
    prepared,
    unpack_message,
)
from mpistrat.process import mpi
from mpistrat.process.waiting import Backoff
from mpistrat.record.layout import Kind
from mpistrat.record.ring import timed
from mpistrat.runtime.agreement.operation import Operation, TimedOutError, call_site
from mpistrat.runtime.topology import Slot, Topology

_REQUEST_BYTES = 1 << 30  # in one request; older MPI libraries cannot count beyond 2^31
_LONGEST_PAUSE = 0.001  # seconds: each look lets MPI send the next piece


class PendingAllReduce:
    """An all-reduce in flight, as `ReplicaContext.experimental_all_reduce_async` returns it.

    Examples
    --------
    >>> import mpistrat
    >>> def fn(x):
    ...     pending = mpistrat.get_replica_context().experimental_all_reduce_async("MEAN", x)
    ...     y = x * x  # meanwhile
    ...     return pending.wait() + y
    >>> float(mpistrat.MultiWorkerMirroredStrategy().run(fn, args=(3.0,)))
    12.0
    """

    def __init__(
        self,
        topology: Topology,
        description: str,
        requests: list[Any],
        finish: Callable[[], Any],
        timeout_seconds: float | None,
    ):
        self._topology = topology
        self._description = description
        self._requests = requests
        self._finish = finish
        self._timeout_seconds = timeout_seconds
        self._result: Any = None
        self._completing = False

    def test(self) -> bool:
        """Return whether `wait` would return at once. The call lets MPI make progress."""
        if self._requests and mpi.start().Request.Testall(self._requests):
            self._complete()
        return not self._requests

    def wait(self) -> Any:
        """Wait for the combined value and return it, as `ReplicaContext.all_reduce` does. May be called again.

        Raises
        ------
        TimeoutError
            If ``timeout_seconds`` of the options have passed. The text names the operation and its number. Which
            rank is behind is not known, since all ranks have begun it. Later collectives of this communicator fail.
        RuntimeError
            If the all-reduce is not done, and a collective of this communicator was given up before.
        """
        if self._requests and self._topology.lock.given_up:
            if not self.test():
                raise RuntimeError(
                    f"rank {self._topology.rank}: waiting for {self._description} {self._topology.lock.given_up}"
                )
        elif self._requests and self._timeout_seconds is not None:
            self._wait_for(self._timeout_seconds)
        elif self._requests:
            self.wait_for_mpi()
            self._complete()
        return self._result

    def wait_for_mpi(self) -> None:
        """Wait without limit until MPI has finished with the arrays. Call `wait` for the value."""
        _wait_all(self._requests)

    def _wait_for(self, seconds: float) -> None:
        deadline, backoff = time.monotonic() + seconds, Backoff(_LONGEST_PAUSE)
        while not self.test():
            if time.monotonic() > deadline:
                topology = self._topology
                text = (
                    f"rank {topology.rank}: {self._description}, waited for{call_site()}, was not done within "
                    f"{seconds:g} s: all {topology.size} ranks have begun it, and which of them is behind, or whether "
                    "the wire is, is not known"
                )
                topology.lock.give_up("after a time-out", text)
                raise TimedOutError(f"{text}; fix: see what these do, or allow more by timeout_seconds")
            backoff.pause()

    def _complete(self) -> None:
        if self._completing:  # finish() works in place and cannot run twice
            raise RuntimeError(
                f"rank {self._topology.rank}: {self._description} was interrupted in wait() or test(): its value is "
                "lost here"
            )
        self._completing = True
        with np.errstate(all="ignore"):
            result = self._finish()
        self._topology.slot(InFlight).discard(self)
        self._result, self._requests = result, []
        self._finish = lambda: None  # the callable kept the messages in memory

    def __repr__(self) -> str:
        return f"<PendingAllReduce: {'in flight' if self._requests else 'done'}>"


def _wait_for_all(requests: list[Any]) -> None:
    mpi.start().Request.Waitall(requests)


_wait_all = timed(Kind.REDUCE_WIRE, _wait_for_all)


def completed_all_reduce(topology: Topology, result: Any) -> PendingAllReduce:
    """Return an all-reduce that is done, with its result."""
    pending = PendingAllReduce(topology, "all_reduce_async", [], lambda: result, None)
    pending._complete()
    return pending


class InFlight(set[PendingAllReduce], Slot):
    """The asynchronous all-reduces of a topology that are not done."""

    def finish(self) -> None:
        for pending in list(self):  # all ranks have begun it, so it ends
            pending.wait_for_mpi()


def all_reduce_async(
    topology: Topology,
    op: Op,
    values: Sequence[np.ndarray],
    bytes_per_pack: int,
    timeout_seconds: float | None,
    rebuild: Callable[[list[np.ndarray]], Any],
    form: Hashable = None,
) -> PendingAllReduce:
    """Begin an all-reduce of copies of some arrays, ``MPI_Iallreduce`` (MPI 4.1 section 6.12.9) for each message.

    Collective: waits until all ranks begin it, which compare ``form``.
    """
    for pending in list(topology.slot(InFlight)):
        pending.test()  # releases finished all-reduces even if the program never calls wait()
    key = tuple((value.dtype, value.shape) for value in values)
    reductions = prepared(topology)
    reduction = reductions.get(("asynchronous", op, form, bytes_per_pack, key))
    if reduction is None:
        with structures.refusals("all_reduce_async", topology, timeout_seconds):
            reduction = _reduction(topology, op, key, bytes_per_pack, form)
        reductions.keep(("asynchronous", op, form, bytes_per_pack, key), reduction)
    return reduction.run((values, rebuild), timeout_seconds)


def _reduction(topology: Topology, op: Op, key: Key, bytes_per_pack: int, form: Hashable) -> Reduction:
    """Prepare an asynchronous all-reduce. Its values are the arrays and the function that rebuilds the structure."""
    algorithm = None if topology.size == 1 else "mpi"
    messages = packed_for_host(topology, Choice.of(topology), op, key, bytes_per_pack, algorithm)
    empty = [(i, result_dtype(dtype, op)) for i, (dtype, shape) in enumerate(key) if not math.prod(shape)]
    operation = Operation("all_reduce_async", op.name, key, form, bytes_per_pack or None)

    def pack_values(values: Sequence[Any]) -> tuple[list[np.ndarray], Callable[[list[Any]], Any]]:
        arrays, rebuild = values
        return [joined(message, arrays) for message in messages], rebuild

    def combine(
        state: tuple[list[np.ndarray], Callable[[list[Any]], Any]], timeout_seconds: float | None
    ) -> PendingAllReduce:
        packed, rebuild = state
        requests: list[Any] = []

        def end() -> Any:
            out: list[Any] = [None] * len(key)
            for message, flat in zip(messages, packed, strict=True):
                total = flat if message.wire is message.result else np.empty(message.length, message.result)
                finish(flat, message.divisor, total)
                unpack_message(message, total, out)
            for i, dtype in empty:
                out[i] = np.empty(key[i][1], dtype)
            return rebuild(out)

        description = f"{operation} (collective number {topology.lock.sequence})"
        pending = PendingAllReduce(topology, description, requests, end, timeout_seconds)
        if topology.size > 1:
            # Kept before it begins: MPI writes to the messages even if a signal handler leaves this call.
            topology.slot(InFlight).add(pending)
            for message, flat in zip(messages, packed, strict=True):
                _begin(topology, message, flat, requests)
        return pending

    def unpack_values(pending: PendingAllReduce) -> PendingAllReduce:
        if not pending._requests:
            pending._complete()
        return pending

    return Reduction(topology, operation, Steps(pack_values, combine, unpack_values, meets=False))


def _begin(topology: Topology, message: Message, flat: np.ndarray, requests: list[Any]) -> None:
    MPI = mpi.start()
    operation = mpi_operation(message.combine, flat.dtype)
    step = _REQUEST_BYTES // flat.itemsize
    requests.extend(
        topology.world.Iallreduce(MPI.IN_PLACE, flat[start : start + step], operation)
        for start in range(0, len(flat), step)
    )
