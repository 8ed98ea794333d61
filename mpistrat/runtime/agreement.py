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

PAYLOAD_BYTES = 8 << 10  # of a message between leaders that takes as long as one without payload
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


class _Views(NamedTuple):
    """Where a payload lies: with what is said before it, received, and in the memory of the node."""

    message: np.ndarray
    mine: np.ndarray
    theirs: np.ndarray
    result: np.ndarray


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
        # The operation's word, and how many bytes of payload follow.
        self._own_header, self._their_header = (
            memoryview(each.data)[:_HEADER].cast("q") for each in (self._own, self._theirs)
        )
        self._bare = self._own[:_HEADER]
        self._views: dict[tuple[np.dtype, int], _Views] = {}
        if leaders is not None:
            self._steps = _steps(leaders.rank, leaders.size)

    def agree(self, operation: Operation) -> bool:
        return self.agree_combining(operation.word, None)

    def agree_combining(self, word: int, payload: Payload | None) -> bool:
        """As `agree`. If so, ``memory.result`` holds the combination of all nodes' payloads."""
        memory = self._memory
        said = memory.meet_saying(word)
        if self._leaders is not None:
            agreed = said == word.to_bytes(8, sys.byteorder) * memory.size
            self._exchange(word if agreed else _DISAGREED, payload)
        memory.meet()
        return memory.verdict[0] == word

    def _exchange(self, word: int, payload: Payload | None) -> None:
        header, views = self._own_header, None
        header[0], header[1] = word, 0
        if payload is not None and word != _DISAGREED:
            views = self._views_of(payload)
            header[1] = views.mine.nbytes
            payload.fill(views.mine)
        for send, receive, replaces in self._steps:
            self._move(views.message if views is not None and header[1] else self._bare, send, receive)
            if receive is None:
                continue
            if header[0] != self._their_header[0] or header[1] != self._their_header[1]:
                header[0], header[1] = _DISAGREED, 0
            elif views is not None and header[1]:
                assert payload is not None
                if replaces:
                    views.mine[...] = views.theirs
                elif receive < self._leaders.rank:  # in one order on both sides: products may depend on it
                    payload.combine(views.theirs, views.mine, out=views.mine)
                else:
                    payload.combine(views.mine, views.theirs, out=views.mine)
        self._memory.verdict[0] = header[0]
        if views is not None and header[1]:
            views.result[...] = views.mine

    def _move(self, message: np.ndarray, send: int | None, receive: int | None) -> None:
        if send is not None and receive is not None:
            self._leaders.Sendrecv(message, send, _TAG, self._theirs, receive, _TAG)
        elif send is not None:
            self._leaders.Send(message, send, _TAG)
        else:
            self._leaders.Recv(self._theirs, receive, _TAG)

    def _views_of(self, payload: Payload) -> _Views:
        key = payload.dtype, payload.length
        views = self._views.get(key)
        if views is None:
            if len(self._views) > 1024:
                self._views.clear()
            end = _HEADER + payload.length * payload.dtype.itemsize
            mine, theirs = (each[_HEADER:end].view(payload.dtype) for each in (self._own, self._theirs))
            result = self._memory.total(payload.dtype, payload.length)
            views = self._views[key] = _Views(self._own[:end], mine, theirs, result)
        return views


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
