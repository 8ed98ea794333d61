"""One collective of a communicator at a time, and all ranks in the same one.

A thread that makes a collective takes the lock with `CollectiveLock.begin`, which returns the *word* of its first
meeting: the checksum of the operation and the number of the collective. Every meeting of every algorithm compares
words. A rank that is a call behind, or has left a call, thus differs from the others.

A collective that was interrupted before other ranks could meet this one is not counted, and may be repeated. After one
that was interrupted later the rank is out of step: its next meeting tells the others, and all ranks raise.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, TypeVar

from mpistrat.runtime.agreement import arrival, threads
from mpistrat.runtime.agreement.agreement import Agreement, Payload, TwoTierAgreement
from mpistrat.runtime.agreement.operation import (
    MismatchError,
    Operation,
    Said,
    TimedOutError,
    call_site,
    mismatch,
    out_of_step,
    ranks_in_words,
    with_article,
)
from mpistrat.runtime.memory.node import NodeMemory
from mpistrat.runtime.process import float_errors
from mpistrat.runtime.record import flight_record
from mpistrat.runtime.record.writers import Flight

# A word: bits 0 to 17 are the number of the collective, 18 to 29 the meeting in it, 30 to 61 the checksum of the
# operation. A rank that is out of step sets bit 62, and gives its rank for the number: it agrees with no other.
_NUMBERS = (1 << 18) - 1
_MEETING = 1 << 18
_MEETINGS = (1 << 12) - 1
_OUT_OF_STEP = 1 << 62

_Error = TypeVar("_Error", bound=BaseException)


class CollectiveLock:
    """The lock of a communicator: one collective at a time, which all ranks make together.

    Attributes
    ----------
    size, rank, nodes, world
        As of `Topology`, which is one.
    sequence : int
        The number of the collective that this rank is in, or completed last.
    taken : bool
        Whether a thread is in a collective. Cleared in `end` and `failed`, and directly where a call takes too long.
    frame : types.FrameType or None
        The frame of the function that must release the lock, if one is known. Once no thread is in it, the lock is
        abandoned. Assign it before a call of `failed`: a signal handler may raise where that function begins.
    mismatches : int
        How many times the ranks met in different collectives.
    timeout_seconds : float or None
        How long each collective waits for the other ranks, unless it is told otherwise. See `limited`.
    memory : NodeMemory or None
        What the ranks of this node share; None on all ranks if those of one node cannot.
    only_meets : bool
        Whether the ranks wait for each other in `meet` alone until this collective ends: on one node they then notice
        a rank that has left it. `turn` takes it from ``meets``; the thread that holds the lock may correct it.
    compares_places, compares_variables : bool
        Whether the ranks compare also the lines that call collectives, and the copies of variables (``rc.debug``).
    flight : Flight or None
        What notes the collectives of this communicator in the flight record; None without a record.
    ignoring_float_errors : callable
        ``call(function, *arguments)`` without floating point errors. For the thread that holds the lock.
    """

    # The limit is a slot: `limited` shares all else.
    __slots__ = ("__dict__", "__weakref__", "timeout_seconds")

    size: int
    rank: int
    nodes: tuple[tuple[int, ...], ...]
    world: Any
    memory: NodeMemory | None
    only_meets = False
    compares_places: bool
    compares_variables: bool
    timeout_seconds: float | None
    flight: Flight | None
    _agreement: Agreement
    _pending = False
    _in_mpi = False  # whether this rank has begun to agree by MPI
    _operation: Operation
    _before = 0  # meetings of this rank's node before this collective
    _word = 0
    _meetings = 0  # of this collective, after the first
    _given_up = ""  # of the class: that of new objects
    _left = ""

    def __init__(self) -> None:
        self.timeout_seconds = None
        self.sequence = self.mismatches = 0
        self.ignoring_float_errors = float_errors.ignoring()
        self._interrupted = ""  # the call of this rank that was left by an error
        self._tells = False  # whether the next meeting can tell the other ranks
        self._blamed = -1  # the sequence when that was
        # Python 3.11 finds the attributes of an object at once, and those of its class by a search (30 ns each).
        self.memory, self.flight = None, None
        self.compares_variables = self.compares_places = False
        self._given_up = type(self)._given_up
        self._arrivals = 0
        self._awaited = -1  # the sequence when all ranks last were here
        # Attributes rather than a lock: Python serves signals, and other threads, after a call into C, so not between
        # assignments.
        self.taken = False
        self.frame: FrameType | None = None

    def limited(self, timeout_seconds: float | None) -> Any:
        """Return the same ranks and lock with another default limit; None for no limit."""
        if timeout_seconds == self.timeout_seconds:
            return self
        other = object.__new__(type(self))
        other.__dict__ = self.__dict__
        other.timeout_seconds = timeout_seconds
        return other

    def turn(
        self, operation: Operation, meets: bool = False, timeout_seconds: float | None = None
    ) -> CollectiveLock:
        """Return a context in which this thread holds the lock and makes the collective ``operation``.

        The ranks compare checksums of the description first, which makes those that disagree raise instead of
        hang or compute nonsense.

        Parameters
        ----------
        operation : Operation
        meets : bool
            The caller calls `meet` itself, before all other communication: once it has laid down in the
            memory of the node what the others then read.
        timeout_seconds : float, optional
            As in `begin`.

        Raises
        ------
        MismatchError
            On every rank, if the ranks are not all in the same operation, or one has ended its program.
        TimeoutError, RuntimeError
            As `begin`.
        """
        frame = sys._getframe(1)
        word = self.begin(operation, timeout_seconds)
        self.frame = frame
        if self.size > 1:
            if self.compares_places:
                operation = Operation(
                    operation.name, *operation.parts, f"number {self.sequence}{call_site()}"
                )
                word = operation.word | word & (_MEETING - 1)
            self._operation, self._word, self._meetings = operation, word, 0
            self.only_meets = meets
            if meets:
                self._pending = True
                return self
            try:
                self._in_mpi = self.memory is None
                if not self._agreement.agree(word):
                    self.disagree(operation)
                if self.flight is not None:
                    self.flight.meet()
            except BaseException as error:
                self.__exit__(type(error))
                raise
        return self

    def compare(self, operation: Operation, timeout_seconds: float | None = None) -> None:
        """Wait until all ranks call this with the same operation.

        Raises
        ------
        MismatchError, TimeoutError, RuntimeError
            As `turn`.
        """
        with self.turn(operation, self.memory is not None, timeout_seconds):
            if self.memory is not None:
                self.meet()

    def begin(self, operation: Operation, timeout_seconds: float | None = None) -> int:
        """Take the lock, and return the word of the first meeting. Release it by `end` or `failed`.

        Parameters
        ----------
        operation : Operation
        timeout_seconds : float, optional
            How long to wait until all ranks are here, which must be given a limit too; infinite for no limit. By
            default that of these turns. A limit costs a message of every rank to rank 0 and back.

        Raises
        ------
        TimeoutError
            If some ranks do not come in time. No collective of this communicator works from then on.
        RuntimeError
            If another thread is in a collective of this communicator, this one reads ahead, or a collective was
            given up before.
        """
        if threads.without:
            threads.refuse(operation.name)
        if self.taken:
            self._take_over(operation)
        self.taken = True
        self.sequence = number = self.sequence + 1
        self._operation = operation
        memory = self.memory
        self._before = 0 if memory is None else memory.meetings
        word = operation.word + (number & _NUMBERS)
        if timeout_seconds is None:
            timeout_seconds = self.timeout_seconds
        try:
            if timeout_seconds is not None or self._given_up:
                self.only_meets = False  # the wait with a limit is by messages
                word = self._begin_with_care(operation, word, timeout_seconds)
            elif self.flight is not None:
                self.flight.enter(operation, number)
        except BaseException as error:  # also of a signal handler, where one of these functions begins
            self.frame = error.__traceback__.tb_frame  # type: ignore[union-attr]
            self.failed(type(error))
            raise
        self.only_meets = True
        return word

    def _begin_with_care(self, operation: Operation, word: int, timeout_seconds: float | None) -> int:
        """Wait with a limit. After a collective was given up, refuse, unless the meeting can tell the other ranks."""
        if self.flight is not None and not self._given_up:
            self.flight.enter(operation, self.sequence)
        if self.size == 1:
            return word
        limited = timeout_seconds is not None and timeout_seconds != math.inf
        if self._given_up:
            if self._tells and not limited:
                assert self.memory is not None
                if not self.memory.agreed():  # this rank was interrupted where the others saw that
                    self.disagree(operation)
                return _OUT_OF_STEP | word & ~_NUMBERS | self.rank
            raise RuntimeError(f"rank {self.rank}: {operation.name} {self._given_up}")
        if limited:
            assert timeout_seconds is not None
            self._wait_for_all(operation, timeout_seconds)
        return word

    def end(self) -> None:
        """Release the lock that `begin` took: this rank has completed the collective."""
        # Together: a lock that is taken without a frame would pass for that of another thread.
        self.taken = False
        self.frame = None
        if self.flight is not None:
            self.flight.leave()

    def _end_turn(self) -> None:
        self._pending = False
        self.end()
        self._in_mpi = False

    def failed(self, kind: type[BaseException]) -> None:
        """Release the lock after an error of class ``kind``: this rank has not completed the collective.

        It may repeat the collective if no other rank has met it. Else it is out of step. On one node, the other ranks
        notice that in their next meeting, unless they wait inside MPI.
        """
        if self.flight is not None:
            self.flight.leave()
        flight_record.note(f"{self._operation.name}{call_site()} was left by {kind.__name__}")
        if not issubclass(kind, MismatchError):
            if self.size > 1 and self._has_met() and not self._given_up:
                self._leave(kind.__name__, noticed=self.only_meets and len(self.nodes) == 1)
            # No call from here on. If a signal handler raises earlier, the next collective calls this function again.
            self.sequence -= 1
        self.taken = self._pending = self._in_mpi = False
        self.frame = None

    def _has_met(self) -> bool:
        """Return whether other ranks may have met this one in its collective."""
        memory = self.memory
        return (
            self._in_mpi
            or self._awaited == self.sequence
            or (memory is not None and memory.meetings != self._before)
        )

    def _leave(self, why: str, noticed: bool) -> None:
        text = f"rank {self.rank}'s call {self._operation}{call_site()} (collective number {self.sequence})"
        text += f" was interrupted by {why}"
        self._interrupted = text
        self._tells = noticed
        if not noticed:
            self._left = text
        self.give_up(f"after {with_article(why)} in the middle of a collective", text)

    def left_call(self, name: str, kind: type[BaseException], sequence: int) -> None:
        """Note that a call of the program was left by an error, which began when ``sequence`` collectives were made.

        Its last collective does not count, so that the others are told. If all ranks leave the call, they stay in step.
        """
        flight_record.note(f"{name}{call_site()} was left by {kind.__name__}")
        # The caller handles the error behind its `with` statement, if it has one.
        if self.taken and (self.frame is sys._getframe(1) or self._is_abandoned()):
            self.failed(kind)
        if (
            self.size > 1
            and sequence < self.sequence != self._blamed
            and not self._given_up
            and not issubclass(kind, MismatchError)
        ):
            self._interrupted = (
                f"rank {self.rank}'s call {name}{call_site()} was interrupted by {kind.__name__} after its part in "
                f"collective number {self.sequence}"
            )
            self.sequence -= 1
            self._blamed = self.sequence

    def _take_over(self, operation: Operation) -> None:
        """Take the lock from a collective that an interrupt left without releasing it."""
        if not self._is_abandoned():
            raise RuntimeError(
                f"rank {self.rank}: {operation.name} was called while another thread is in a collective of the "
                "same communicator: one thread at a time; give each thread a communicator (comm=) of its own"
            )
        self.failed(InterruptedError)

    def _is_abandoned(self) -> bool:
        """Return whether no thread is in the function that must release the lock, if that is known.

        Python interrupts a program where a function begins: also `failed`, ``__enter__`` and ``__exit__``.
        """
        return self.frame is not None and not threads.is_in(self.frame)

    def _wait_for_all(self, operation: Operation, seconds: float) -> None:
        self._arrivals += 1
        self._awaited = self.sequence
        try:
            arrival.wait_for_all(self.world, self._arrivals, seconds)
        except arrival.LateError as error:
            text = (
                f"rank {self.rank}: {operation}{call_site()} (collective number {self.sequence}): "
                f"{ranks_in_words(error.ranks)} of {self.size} did not come within {seconds:g} s"
            )
            self.give_up("after a time-out", text)
            raise TimedOutError(f"{text}; fix: see what these do, or allow more by timeout_seconds") from None

    def give_up(self, when: str, text: str) -> None:
        """Refuse all further collectives: the ranks are not in step any more. ``text`` says what happened."""
        self._given_up = f"{when}: the ranks are not in step any more, end the program ({text})"

    @property
    def given_up(self) -> str:
        """The reason why all further collectives are refused; empty if they are not."""
        return self._given_up if self.size > 1 else ""

    def meet(self, payload: Payload | None = None) -> None:
        """Wait for all ranks of the node. The first call in a collective waits for all ranks, which agree then.

        Only where they have `memory`. A payload is combined over all ranks, into the result of the memory.

        Raises
        ------
        MismatchError
            As `turn`.
        """
        if payload is not None:
            agreed = self.combining(payload)(self._word if self._pending else self._next_word())
        elif self._pending:
            agreed = self._agreement.agree(self._word)
        else:
            # A rank that left this collective by an error must not be taken for one that is in it.
            assert self.memory is not None
            agreed = self.memory.meet_saying(self._next_word())
        self._pending = False
        if not agreed:
            self.disagree(self._operation)
        if self.flight is not None:
            self.flight.meet()

    def combining(self, payload: Payload) -> Callable[[int], bool]:
        """Return `meet` with this payload, prepared: it gets a word, and returns whether all ranks gave it."""
        assert isinstance(self._agreement, TwoTierAgreement)
        return self._agreement.combining(payload)

    def _next_word(self) -> int:
        self._meetings += 1
        return self.later_word(self._word, self._meetings)

    @staticmethod
    def later_word(word: int, meetings: int) -> int:
        """Return the word of a meeting after the first of a collective."""
        return word + (meetings & _MEETINGS) * _MEETING

    def __enter__(self) -> CollectiveLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            self._end_turn()
        else:
            self.failed(kind)

    def disagree(self, operation: Operation) -> NoReturn:
        """Raise the error that says what each rank does. Called by all ranks."""
        own = operation.name, str(operation), call_site(), self.sequence, self._interrupted, self._tells
        heard: list[list[tuple[Any, ...]]] = []
        exchange = map(self.world.allgather, [own])
        try:
            # One call into C: if a signal handler raises, then after it, when all ranks have heard of each other.
            heard.extend(exchange)
            error = self._disagreement(heard[0])
        except BaseException as failure:
            if heard:
                self._disagreement(heard[0])
            else:
                name, self._tells = type(failure).__name__, False
                self.give_up(
                    f"after {with_article(name)} in the middle of a collective",
                    f"rank {self.rank}'s call {operation}{own[2]} was interrupted by {name}",
                )
            raise
        raise error

    def _disagreement(self, heard: list[tuple[Any, ...]]) -> MismatchError:
        """Return the error of this rank. The ranks may go on if they are in step, else this one gives up."""
        said = [Said(*each) for each in heard]
        sequence = said[self.rank].sequence
        in_step = all(each.sequence == sequence and not each.interrupted_in_it for each in said)
        error = (mismatch if in_step else out_of_step)(self.rank, sequence, said)
        self._tells = False
        self.sequence = max(each.sequence for each in said)
        if in_step:
            self.on_all_ranks(error)
        else:
            self.give_up("after an interrupted call", str(error))
        self.mismatches += 1
        return error

    def on_all_ranks(self, error: _Error) -> _Error:
        """Return an error that all ranks raise at the same place, so that no rank waits for another."""
        self._in_mpi = False
        self._awaited = -1
        if self.memory is not None:
            self._before = self.memory.meetings
        return error
