"""How the ranks find out whether all of them are in the same collective, before any of its data moves."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpistrat.runtime import mpi
from mpistrat.runtime.node_memory import NodeMemory
from mpistrat.runtime.operation import Operation

# Bytes of a message between leaders: that Open MPI sends over TCP without a handshake, and that takes about as long
# as one without payload.
PAYLOAD_BYTES = 48 << 10
FREE_BYTES = 8 << 10
_DISAGREED = -1
_TAG = 0
_HEADER = 16  # bytes of a message before its payload


class Payload(NamedTuple):
    """A small array that is combined on the way.

    Attributes
    ----------
    dtype, length
        Of what is combined.
    combine : numpy.ufunc
        Of two arguments, commutative.
    fill : callable
        Writes what the ranks of this node come to into the array it is given. Called on leaders only.
    """

    dtype: np.dtype
    length: int
    combine: Any
    fill: Callable[[np.ndarray], None]


class Agreement(ABC):
    """A way to compare the operation that each rank is about to make."""

    @abstractmethod
    def agree(self, operation: Operation) -> bool:
        """Whether all ranks call this with the same operation. Waits for them."""


class MpiAgreement(Agreement):
    """One all-reduce of 16 bytes: the maximum of a checksum and of its negative."""

    def __init__(self, world: Any):
        self._all_reduce = world.Allreduce
        self._max = mpi.start().MAX
        self._extremes = np.empty(2, np.int64)

    def agree(self, operation: Operation) -> bool:
        self._all_reduce(operation.checksum, self._extremes, self._max)
        return self._extremes.tobytes() == operation.agreed


class NodeAgreement(Agreement):
    """One barrier; the checksums lie in the memory that the ranks share."""

    def __init__(self, memory: NodeMemory):
        self._say = memory.meet_saying
        self._size = memory.size

    def agree(self, operation: Operation) -> bool:
        return self._say(operation.word) == operation.word_bytes * self._size


class TwoTierAgreement(Agreement):
    """The ranks of a node by their shared memory, then the leaders of nodes by messages.

    Between leaders a recursive doubling (Thakur, Rabenseifner and Gropp 2005, section 4.2), whose messages may
    carry an array of up to `PAYLOAD_BYTES`. A leader that hears another checksum, or another size, goes on
    with the news alone: no leader is left waiting, whatever the others do.
    """

    def __init__(self, memory: NodeMemory, leaders: Any):
        self._memory = memory
        self._leaders = leaders
        self._own, self._theirs = (np.zeros(_HEADER + PAYLOAD_BYTES, np.uint8) for _ in range(2))
        self._steps = _steps(leaders.rank, leaders.size) if leaders is not None else []
        self._exchanges: dict[Any, tuple[np.ndarray, Callable[[int], None]]] = {}

    def agree(self, operation: Operation) -> bool:
        return self.agree_combining(operation.word, None)

    def agree_combining(self, word: int, payload: Payload | None) -> bool:
        """As `agree`. If so, ``memory.result`` holds the combination of all nodes' payloads."""
        memory = self._memory
        said = memory.meet_saying(word)
        if self._leaders is not None:
            agreed = said == word.to_bytes(8, sys.byteorder) * memory.size
            mine, exchange = self._exchange_of(payload if agreed else None)
            if agreed and payload is not None:
                payload.fill(mine)
            exchange(word if agreed else _DISAGREED)
        memory.meet()
        return memory.verdict[0] == word

    def _exchange_of(self, payload: Payload | None) -> tuple[np.ndarray, Callable[[int], None]]:
        """Where this node's payload belongs, and a function that exchanges it together with a word."""
        key = None if payload is None else (payload.dtype, payload.length, payload.combine)
        found = self._exchanges.get(key)
        if found is None:
            if len(self._exchanges) > 1024:
                self._exchanges.clear()
            if payload is None:
                payload = Payload(np.dtype(np.uint8), 0, np.bitwise_or, lambda total: None)
            found = self._exchanges[key] = self._exchange(payload.dtype, payload.length, payload.combine)
        return found

    def _exchange(
        self, dtype: np.dtype, length: int, combine: Any
    ) -> tuple[np.ndarray, Callable[[int], None]]:
        nbytes = length * dtype.itemsize
        mine, other = (each[_HEADER : _HEADER + nbytes].view(dtype) for each in (self._own, self._theirs))
        # The operation's word, and how many bytes of payload follow.
        header, other_header = (
            memoryview(each.data)[:_HEADER].cast("q") for each in (self._own, self._theirs)
        )
        whole, bare, theirs = self._own[: _HEADER + nbytes], self._own[:_HEADER], self._theirs
        leaders, steps, verdict = self._leaders, self._steps, self._memory.verdict
        result = self._memory.total(dtype, length)

        def exchange(word: int) -> None:
            header[0], header[1] = word, nbytes
            message = whole
            for send, receive, replaces in steps:
                if receive is None:
                    leaders.Send(message, send, _TAG)
                    continue
                if send is None:
                    leaders.Recv(theirs, receive, _TAG)
                else:
                    leaders.Sendrecv(message, send, _TAG, theirs, receive, _TAG)
                if header[0] != other_header[0] or header[1] != other_header[1]:
                    header[0], header[1] = _DISAGREED, 0
                    message = bare
                elif message is bare or not nbytes:
                    pass
                elif replaces:
                    mine[...] = other
                elif receive < leaders.rank:  # in one order on both sides: products may depend on it
                    combine(other, mine, out=mine)
                else:
                    combine(mine, other, out=mine)
            verdict[0] = header[0]
            if header[1]:
                result[...] = mine

        return mine, exchange


def _steps(rank: int, size: int) -> list[tuple[int | None, int | None, bool]]:
    """Whom to send to and receive from in each step, and whether what comes is the final result.

    The ranks beyond a power of two give theirs to a partner beforehand and get the result afterwards.
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
