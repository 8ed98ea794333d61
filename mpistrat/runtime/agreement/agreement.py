"""The agreement: ranks check that all are in the same collective, before any data moves, and wait with a time limit."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpistrat.memory.node import NodeMemory
from mpistrat.process import mpi
from mpistrat.process.cache import Cache
from mpistrat.process.waiting import Backoff

PAYLOAD_BYTES = 1 << 20  # the largest payload of a message between leaders
_DISAGREED = -1
_MOST_EXCHANGES = 1024
_TAG = 0
_HEADER = 16  # bytes of a message before its payload


class Payload(NamedTuple):
    """A small array that the messages of the agreement carry and combine."""

    dtype: np.dtype
    length: int
    combine: Any  # a commutative function of two arguments
    # writes the combined value of this node's ranks into its argument. Called on leaders only.
    fill: Callable[[np.ndarray], None]


class Exchange(NamedTuple):
    """One message pattern between leaders. ``make`` sends ``payload`` with a token, and leaves the result."""

    payload: np.ndarray
    make: Callable[[int], None]


class Agreement(ABC):
    """A method by which ranks compare the operations that they are about to start."""

    # what the ranks of a node share, and meet in; None if they compare by MPI alone
    memory: NodeMemory | None = None

    @abstractmethod
    def agree(self, token: int) -> bool:
        """Return whether all ranks give the same token, made by `CollectiveLock.begin`. Waits for all ranks."""


class MpiAgreement(Agreement):
    """An agreement by one all-reduce of 16 bytes: the maxima of the tokens and of their negatives."""

    def __init__(self, world: Any):
        self._all_reduce = world.Allreduce
        self._max = mpi.start().MAX
        self._pair, self._extremes = np.empty((2, 2), np.int64)

    def agree(self, token: int) -> bool:
        self._pair[:] = token, -token
        self._all_reduce(self._pair, self._extremes, self._max)
        return self._extremes.tobytes() == self._pair.tobytes()


class NodeAgreement(Agreement):
    """An agreement by one barrier, with the tokens in the memory that the ranks share."""

    def __init__(self, memory: NodeMemory):
        self.memory = memory
        self._exchange_token = memory.barrier_with_token

    def agree(self, token: int) -> bool:
        return self._exchange_token(token)


class TwoTierAgreement(Agreement):
    """An agreement by shared memory inside each node, then by messages between leaders.

    Leaders use recursive doubling (Thakur, Rabenseifner and Gropp 2005, section 4.2). Its messages may carry an array
    of up to `PAYLOAD_BYTES`, as the all-reduce "leader" does. A leader that receives another token or size sends only
    the disagreement from then on, so that every leader finishes all steps.
    """

    def __init__(self, memory: NodeMemory, leaders: Any):
        self.memory = self._memory = memory
        self._leaders = leaders
        self._exchanges = Cache[Any, Exchange](_MOST_EXCHANGES)
        if leaders is not None:
            self._steps = _steps(leaders.rank, leaders.size)
            self._outgoing, self._incoming = (np.zeros(_HEADER + PAYLOAD_BYTES, np.uint8) for _ in range(2))
            self._bare = self._exchange(np.dtype(np.uint8), 0, np.bitwise_or)

    def agree(self, token: int) -> bool:
        if self._leaders is None:
            return self._follow(token)
        return self._lead(None, self._bare, token)

    def combining(self, payload: Payload) -> Callable[[int], bool]:
        """Return a function that does as `agree`, and combines payloads into ``memory.result`` if tokens are equal."""
        if self._leaders is None:
            return self._follow
        key = payload.dtype, payload.length, payload.combine
        exchange = self._exchanges.get(key)
        if exchange is None:
            exchange = self._exchanges.keep(key, self._exchange(*key))
        return partial(self._lead, payload.fill, exchange)

    def _follow(self, token: int) -> bool:
        memory = self._memory
        memory.barrier_with_token(token)
        memory.meet()
        return memory.verdict[0] == token

    def _lead(self, fill: Callable[[np.ndarray], None] | None, exchange: Exchange, token: int) -> bool:
        memory = self._memory
        if memory.barrier_with_token(token):
            if fill is not None:
                fill(exchange.payload)
            exchange.make(token)
        else:
            self._bare.make(_DISAGREED)
        memory.meet()
        return memory.verdict[0] == token

    def _exchange(self, dtype: np.dtype, length: int, combine: Any) -> Exchange:
        nbytes = length * dtype.itemsize
        outgoing, incoming = self._outgoing, self._incoming
        payload, other = (buffer[_HEADER : _HEADER + nbytes].view(dtype) for buffer in (outgoing, incoming))
        # A header is the operation's token and the number of payload bytes.
        header, other_header = (memoryview(buffer.data)[:_HEADER].cast("q") for buffer in (outgoing, incoming))
        full, header_only = outgoing[: _HEADER + nbytes], outgoing[:_HEADER]
        leaders, verdict = self._leaders, self._memory.verdict
        result = self._memory.total(dtype, length)
        # The last sum goes directly into the result, unless it must still be sent.
        last = len(self._steps) - 1 if nbytes and self._steps[-1][1] is not None else None
        steps = [(*step, result if i == last else payload) for i, step in enumerate(self._steps)]

        def make(token: int) -> None:
            header[0], header[1] = token, nbytes
            message = full
            for send, receive, replaces, total in steps:
                if receive is None:
                    leaders.Send(message, send, _TAG)
                    continue
                if send is None:
                    leaders.Recv(incoming, receive, _TAG)
                else:
                    leaders.Sendrecv(message, send, _TAG, incoming, receive, _TAG)
                if header[0] != other_header[0] or header[1] != other_header[1]:
                    header[0], header[1] = _DISAGREED, 0
                    message = header_only
                elif message is header_only or not nbytes:
                    pass
                elif replaces:
                    total[...] = other
                elif receive < leaders.rank:  # the same order on both sides: products may depend on it
                    combine(other, payload, out=total)
                else:
                    combine(payload, other, out=total)
            verdict[0] = header[0]
            if last is None and header[1]:
                result[...] = payload

        return Exchange(payload, make)


def _steps(rank: int, size: int) -> list[tuple[int | None, int | None, bool]]:
    """Return for each step the target, the source, and whether the received message is the final result.

    Ranks beyond a power of two send theirs to a partner first, and receive the result last.
    """
    power = 1 << (size.bit_length() - 1)
    beyond = size - power
    steps: list[tuple[int | None, int | None, bool]] = []
    if rank >= power:
        return [(rank - power, None, False), (None, rank - power, True)]
    if rank < beyond:
        steps.append((None, rank + power, False))
    distance = 1
    while distance < power:
        steps.append((rank ^ distance, rank ^ distance, False))
        distance *= 2
    if rank < beyond:
        steps.append((rank + power, None, False))
    return steps


# --- a wait with a time limit ---------------------------------------------------


_COME, _GO = 1, 2  # tags
_ALL_HERE, _TIME_IS_UP = -1, -2
_GRACE = 1.0  # seconds that rank 0 may take to answer


class LateError(Exception):
    """Ranks that did not arrive within the time limit, or rank 0 if the others wait for it."""

    def __init__(self, ranks: tuple[int, ...]):
        super().__init__(ranks)
        self.ranks = ranks


def wait_for_all(world: Any, sequence: int, seconds: float) -> None:
    """Wait until all ranks have called this with the same number, by messages to rank 0 that never block.

    Raise LateError on every rank that arrived, when one of them has waited for ``seconds``.
    """
    (_as_first if world.rank == 0 else _as_other)(world, sequence, time.monotonic() + seconds)


def _as_first(world: Any, sequence: int, deadline: float) -> None:
    arrived = {0}
    late = False
    backoff = Backoff()
    while True:
        report = _next_report(world, sequence)
        if report is None:
            # Decide only after all messages are read: a rank that arrived may have given up since.
            if late or len(arrived) == world.size or time.monotonic() > deadline:
                break
            backoff.pause()
        else:
            rank, gave_up = report
            arrived.add(rank)
            late = late or gave_up
            backoff.reset()
    missing = sorted(set(range(world.size)) - arrived)
    if late and not missing:
        missing = [0]
    answer = np.array([sequence, *missing, _TIME_IS_UP if missing else _ALL_HERE], np.int64)
    for request in [world.Isend(answer, rank, _GO) for rank in sorted(arrived - {0})]:
        request.Wait()
    if missing:
        raise LateError(tuple(missing))


def _next_report(world: Any, sequence: int) -> tuple[int, bool] | None:
    """Return the next rank that reported and whether it gave up, or None without a message."""
    from mpi4py import MPI

    status, report = MPI.Status(), np.empty(2, np.int64)
    while mpi.has_come(world, MPI.ANY_SOURCE, _COME, status):
        world.Recv(report, status.source, _COME)
        if report[0] == sequence:  # other numbers belong to earlier calls
            return status.source, bool(report[1])
    return None


def _as_other(world: Any, sequence: int, deadline: float) -> None:
    from mpi4py import MPI

    world.Isend(np.array([sequence, 0], np.int64), 0, _COME).Wait()
    answer = np.empty(world.size + 1, np.int64)
    asked, slept, backoff = False, 0.0, Backoff()
    while True:
        status = MPI.Status()
        if mpi.has_come(world, 0, _GO, status):
            world.Recv(answer, 0, _GO)
            if answer[0] != sequence:
                continue
            ranks = answer[1 : status.Get_count(MPI.INT64_T)].tolist()
            if ranks.pop() == _ALL_HERE:
                return
            raise LateError(tuple(ranks))
        if asked:
            if slept > _GRACE:
                raise LateError((0,))
            slept += backoff.pause()  # not the time: all processes of a machine may have been stopped meanwhile
        elif time.monotonic() > deadline:
            asked = True
            world.Isend(np.array([sequence, 1], np.int64), 0, _COME).Wait()
        else:
            backoff.pause()
