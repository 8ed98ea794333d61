"""How the ranks find out whether all of them are in the same collective, before any of its data moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpistrat.runtime import mpi
from mpistrat.runtime.node_memory import NodeMemory
from mpistrat.runtime.operation import Operation

PAYLOAD_BYTES = 8 << 10  # of a message between leaders that takes as long as one without payload
_DISAGREED = -1


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
        self._own, self._theirs = (np.zeros(2 * 8 + PAYLOAD_BYTES, np.uint8) for _ in range(2))
        self._own_word, self._their_word = (each[:16].view(np.int64) for each in (self._own, self._theirs))
        if leaders is not None:
            self._steps = _steps(leaders.rank, leaders.size)

    def agree(self, operation: Operation) -> bool:
        return self.agree_combining(operation, None)

    def agree_combining(self, operation: Operation, payload: Payload | None) -> bool:
        """As `agree`. If so, ``memory.result`` holds the combination of all nodes' payloads."""
        memory = self._memory
        said = memory.meet_saying(operation.word)
        if self._leaders is not None:
            agreed = said == operation.word_bytes * memory.size
            self._exchange(operation.word if agreed else _DISAGREED, payload)
        memory.meet()
        return memory.verdict[0] == operation.word

    def _exchange(self, word: int, payload: Payload | None) -> None:
        own, memory = self._own, self._memory
        nbytes = 0
        if payload is not None and word != _DISAGREED:
            nbytes = payload.length * payload.dtype.itemsize
            payload.fill(own[16 : 16 + nbytes].view(payload.dtype))
        self._own_word[:] = word, nbytes
        for send, receive, replaces in self._steps:
            self._step(send, receive, replaces, payload)
        memory.verdict[0] = int(self._own_word[0])
        nbytes = int(self._own_word[1])
        if nbytes:
            memory.result[:nbytes] = own[16 : 16 + nbytes]

    def _step(self, send: int | None, receive: int | None, replaces: bool, payload: Payload | None) -> None:
        own, theirs, leaders = self._own, self._theirs, self._leaders
        message = own[: 16 + int(self._own_word[1])]
        if send is not None and receive is not None:
            leaders.Sendrecv(message, send, recvbuf=theirs, source=receive)
        elif send is not None:
            leaders.Send(message, send)
        else:
            leaders.Recv(theirs, receive)
        if receive is None:
            return
        nbytes = int(self._their_word[1])
        if self._own_word.tobytes() != self._their_word.tobytes():
            self._own_word[:] = _DISAGREED, 0
        elif replaces:
            own[16 : 16 + nbytes] = theirs[16 : 16 + nbytes]
        elif nbytes:
            assert payload is not None
            mine = own[16 : 16 + nbytes].view(payload.dtype)
            payload.combine(mine, theirs[16 : 16 + nbytes].view(payload.dtype), out=mine)


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
