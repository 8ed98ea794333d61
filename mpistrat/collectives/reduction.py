"""One all-reduce, prepared once for the dtypes, shapes and places of its values, and then run for many values.

`Reduction.run` is the one place where a rank lays down its values, meets the others, and takes the result. What these
steps do depends on the kind of values, and each kind has its constructor: ``on_host`` for arrays on the host,
``arenas.all_reduce`` for buffers in place, ``gpu.all_reduce`` for arrays on a GPU, and ``asynchronous``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np

from mpistrat.collectives.algorithms.contract import Algorithm
from mpistrat.collectives.arithmetic.operations import divide
from mpistrat.collectives.packing import SMALL, Message, new_array, unpack
from mpistrat.process.cache import Cache
from mpistrat.record import ring as trace
from mpistrat.runtime.agreement.collective_call import collective_call
from mpistrat.runtime.agreement.collective_lock import BROKEN, FREE
from mpistrat.runtime.agreement.operation import Operation
from mpistrat.runtime.topology import Slot, Topology

_MOST = 1024  # reductions that are kept
_target = weakref.ref.__call__  # a method of C, for `map`


class Steps(NamedTuple):
    """What a rank does in an all-reduce."""

    # gets the values, and returns what `combine` gets: messages, for example. Does not communicate.
    pack_values: Callable[[Sequence[Any]], Any]
    # gets that and the limit of the call in seconds. Lets an algorithm combine the messages of all ranks, divides for a
    # mean, and returns what `unpack_values` gets.
    combine: Callable[[Any, float | None], Any]
    # gets that, and returns the results in the order of the values. Does not communicate.
    unpack_values: Callable[[Any], Any]
    meets: bool  # whether `combine` calls `CollectiveLock.meet` before it communicates in any other way


class FastPath(NamedTuple):
    """What a rank does in a small all-reduce, whose time is that of its Python calls. See `Steps`."""

    # gets the values and the word of the meeting. Writes the values to memory that other ranks read, waits for all
    # ranks, combines the values of all, divides for a mean, and returns the results; None if the ranks gave different
    # words.
    exchange: Callable[[Sequence[Any], int], Any]
    # waits for all ranks where `exchange` writes, after its meeting, to memory that other ranks read. Gets a word;
    # returns whether all ranks gave the same word.
    meet_again: Callable[[int], bool] | None = None


def steps_alone() -> FastPath:
    """Return the steps on one rank: the results are copies. They enter 2 functions of Python, the general ones 15."""

    def copies(values: Sequence[np.ndarray], word: int) -> list[Any]:
        return [each.copy() if each.size <= SMALL else _copied(each) for each in values]

    return FastPath(copies)


def _copied(value: np.ndarray) -> np.ndarray:
    copy = new_array(value.size, value.dtype).reshape(value.shape)
    copy[...] = value
    return copy


def short_steps(
    topology: Topology, message: Message, algorithm: Algorithm, out: np.ndarray | None = None
) -> FastPath | None:
    """Return the steps of arrays that are one message, and whose ranks meet once; None without `meeting`.

    With ``out``, a flat array, it is the result. Barriers and sums are those of the general steps, which take several
    microseconds more: the time of five barriers of a node, and more where processes share a core.
    """
    memory, ignoring_float_errors = topology.memory, topology.lock.ignoring_float_errors
    if memory is None:  # the ranks do not share it, or the communicator was freed
        return None
    meeting = algorithm.meeting(topology, message.combine, message.result, message.length)
    if meeting is None:
        return None
    slots, meet, take = meeting
    length, dtype, divisor, axis = message.length, message.result, message.divisor, message.axis
    shape = message.runs[0].shape if len(message.members) == 1 and out is None else None
    if shape is not None:
        slots = [each.reshape(shape) for each in slots]
    new = np.empty if length <= SMALL else new_array
    is_flat = shape is not None and len(shape) == 1

    def exchange(values: Sequence[np.ndarray], word: int) -> list[Any] | None:
        slot = slots[memory.generation]
        if shape is None:
            np.concatenate(values, axis, slot)
        else:
            slot[...] = values[0]
        if not meet(word):
            return None
        total = new(length, dtype) if out is None else out
        ignoring_float_errors(take[memory.generation ^ 1], out=total)
        if divisor != 1:
            ignoring_float_errors(divide, total, divisor, total)
        if is_flat or total is out:
            return [total]
        if shape is not None:
            return [total.reshape(shape)]
        results: list[Any] = [None] * len(values)
        unpack(message, total, results)
        return results

    return FastPath(exchange)


class Reduction:
    """A prepared all-reduce. The ranks compare the description ``operation``.

    ``short`` replaces ``steps`` in calls without a limit or a trace. ``only_for`` has the objects that it was prepared
    for, if it is for these alone.
    """

    __slots__ = ("_exchange", "_meet_again", "_only_for", "_operation", "_steps", "_topology")

    def __init__(
        self,
        topology: Topology,
        operation: Operation,
        steps: Steps,
        short: FastPath | None = None,
        only_for: tuple[weakref.ref[Any], ...] = (),
    ):
        self._topology = topology
        self._operation = operation
        self._steps = steps
        self._only_for = only_for
        short = None if topology.lock.compares_places else short
        self._exchange = None if short is None else short.exchange
        self._meet_again = None if short is None else short.meet_again

    def __deepcopy__(self, memo: dict[int, Any]) -> Reduction:
        return self  # it belongs to the ranks, which are not copied

    def is_for(self, values: Sequence[Any]) -> bool:
        """Return whether a reduction of certain objects was prepared for these."""
        return len(values) == len(self._only_for) and all(map(is_, map(_target, self._only_for), values))

    def run(self, values: Sequence[Any], timeout_seconds: float | None = None) -> Any:
        """Return the reductions of the values over all ranks. Raise as `CollectiveLock.collective`."""
        exchange = self._exchange
        if exchange is None or timeout_seconds is not None or trace.ring is not None:
            return self._run(values, timeout_seconds)
        lock = self._topology.lock
        word = lock.begin(self._operation)
        try:
            out = exchange(values, word)
            if out is None or (self._meet_again is not None and not self._meet_again(lock.later_word(word, 1))):
                lock.disagree(self._operation)
            if lock.flight is not None:  # as `end`, without a call
                lock.flight.leave()
            lock.state = FREE
            return out
        except BaseException as error:
            lock.state = BROKEN  # before a call: a signal handler may raise where a function begins
            lock.failed(error)
            raise

    @collective_call(attrgetter("_topology"), "all_reduce")
    def _run(self, values: Sequence[Any], timeout_seconds: float | None) -> Any:
        topology = self._topology
        pack_values, combine, unpack_values, meets = self._steps
        laid = pack_values(values)
        with topology.lock.collective(self._operation, meets, timeout_seconds):
            done = topology.lock.ignoring_float_errors(combine, laid, timeout_seconds)
        return unpack_values(done)


class Reductions(dict[float | None, Cache[Hashable, Reduction]], Slot):
    """The prepared reductions of a topology: for each limit of its calls, by what they were prepared for."""

    def close(self) -> None:
        for each in self.values():  # which the ops of strategies have too
            each.clear()
        self.clear()


def prepared(topology: Topology) -> Cache[Hashable, Reduction]:
    """Return the cache of the reductions that were prepared for these ranks."""
    return topology.slot(Reductions).setdefault(topology.lock.timeout_seconds, Cache(_MOST))
