"""One collective of a communicator at a time, and all ranks in the same one.

A thread that makes a collective takes the lock with `CollectiveLock.begin`, which returns the *token* of its first
meeting: the checksum of the operation and the number of the collective. Every meeting of every algorithm compares
tokens. A rank that is a call behind, or has left a call, thus differs from the others.

The lock is free, held by a thread, or broken. It breaks where this rank leaves a collective by an error that the other
ranks do not raise, such as Ctrl-C: they may have its result already, so that a repeated call would be combined with
their next one. Every later collective raises on this rank. Where the ranks of one node only meet in shared memory, it
also tells them, so that all ranks raise. A rank without others has nothing that could break.

Python runs signal handlers where a function begins, after a call into C and in a jump back, never between two
assignments. So the state changes by assignments. Assign `BROKEN` before a call of `failed`, which frees the lock again
if all ranks raise. An error that comes where ``__enter__`` or ``__exit__`` begins leaves the lock with its thread;
`left_call` then breaks it.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Callable
from threading import get_ident
from typing import Any, NoReturn, TypeVar

import numpy as np

from mpistrat.record import flight_record
from mpistrat.record.writers import Flight
from mpistrat.runtime.agreement import agreement
from mpistrat.runtime.agreement.agreement import Agreement, NodeAgreement, Payload, TwoTierAgreement
from mpistrat.runtime.agreement.operation import (
    MismatchError,
    Operation,
    RankReport,
    TimedOutError,
    call_site,
    mismatch,
    ranks_in_words,
    sequence_mismatch,
)

#: Threads that must not begin a collective: the reason, by the identifier of the thread.
forbidden_threads: dict[int, str] = {}
MAKES_A_BATCH = (
    "was called while a batch was made, by a function given to map() perhaps: ranks read at their own pace, and would "
    "not meet; call it between batches, or use prefetch(0)"
)


def refuse_thread(what: str) -> None:
    """Raise RuntimeError if this thread must not start the collective ``what``."""
    why = forbidden_threads.get(get_ident())
    if why is not None:
        raise RuntimeError(f"{what} {why}")


# --- the lock -------------------------------------------------------------------


# A token: bits 0 to 17 are the number of the collective, 18 to 29 the meeting in it, 30 to 61 the checksum of the
# operation. A rank whose lock is broken sets bit 62, and gives its rank for the number: it agrees with no other.
_NUMBERS = (1 << 18) - 1
_MEETING = 1 << 18
_MEETINGS = (1 << 12) - 1
_OUT_OF_STEP = 1 << 62
FREE, BROKEN = 0, -1  # states of the lock; else it is the identifier of a thread, which is positive

_Error = TypeVar("_Error", bound=BaseException)


class CollectiveLock:
    """The lock of a communicator: one collective at a time, which all ranks make together.

    ``world`` is the communicator, and ``agreement`` how its ranks compare tokens. They stay None without other ranks.
    ``flight`` notes the collectives of this communicator in the flight record; None without a record.
    ``compares_lines`` says whether the ranks compare also the lines that call collectives (``rc.debug``).

    ``sequence`` and ``operation`` are the number and the description of the collective that this rank is in, or was in
    last. ``state`` is `FREE`, `BROKEN`, or the identifier of the thread that holds the lock. ``left`` is the collective
    that this rank has left where it cannot tell the other ranks, which may wait for it. ``mismatches`` counts how many
    times the ranks met in different collectives. Each waits for ``timeout_seconds``, unless told otherwise: `limited`.

    ``is_shared_memory_only`` says whether the ranks wait for each other nowhere but in `meet` until this collective
    ends: on one node they then notice a rank that has left it. `collective` takes it from ``synchronizes``; the thread
    that holds the lock may correct it. That thread calls functions without floating point errors by
    ``ignoring_float_errors(function, *arguments)``.
    """

    # The limit is a slot: `limited` shares all else.
    __slots__ = ("__dict__", "timeout_seconds")

    timeout_seconds: float | None
    _agreement: Agreement
    operation: Operation
    _given_up = ""  # of the class: the value in new objects

    def __init__(
        self,
        rank: int,
        size: int,
        world: Any = None,
        agreement: Agreement | None = None,
        flight: Flight | None = None,
        compares_lines: bool = False,
    ):
        # Python 3.11 finds the attributes of an object at once, and those of its class by a search (30 ns each).
        self.rank, self.size, self.flight, self.compares_lines = rank, size, flight, compares_lines
        self._world, self._memory = world, None if agreement is None else agreement.memory
        if agreement is not None:
            self._agreement = agreement
        self.timeout_seconds = None
        self.sequence = self.mismatches = 0
        self.ignoring_float_errors = ignoring_float_errors()
        self.is_shared_memory_only = self._pending = False
        self._token = self._meetings = 0  # of this collective, after the first
        self.left = ""
        self._interrupted = ""  # the call of this rank that was left by an error
        self._tells = False  # whether the next call can tell the other ranks
        self._settled = -1  # meetings of this rank's node when the ranks last said what each of them does
        self._of_all_ranks: BaseException | None = None
        self._given_up = type(self)._given_up
        self._arrivals = 0
        self.state = BROKEN if self._given_up else FREE

    def limited(self, timeout_seconds: float | None) -> CollectiveLock:
        """Return the same lock with another default limit; None for no limit."""
        other = object.__new__(type(self))
        other.__dict__ = self.__dict__
        other.timeout_seconds = timeout_seconds
        return other

    def collective(
        self, operation: Operation, synchronizes: bool = False, timeout_seconds: float | None = None
    ) -> CollectiveLock:
        """Return a context in which this thread holds the lock and makes the collective ``operation``.

        The ranks compare its checksum first: ranks that disagree raise instead of hanging. With ``synchronizes`` the
        caller calls `meet` itself, before all other communication. Raise MismatchError on every rank if they are not
        all in the same operation, or one has ended its program, and TimeoutError or RuntimeError as `begin` does.
        """
        token = self.begin(operation, timeout_seconds)
        if self.size > 1:
            if self.compares_lines:
                operation = Operation(operation.name, *operation.parts, f"number {self.sequence}{call_site()}")
                token = operation.token | token & (_MEETING - 1)
            self.operation, self._token, self._meetings = operation, token, 0
            self.is_shared_memory_only = self._pending = synchronizes
            if synchronizes:
                return self
            try:
                if not self._agreement.agree(token):
                    self.disagree(operation)
                if self.flight is not None:
                    self.flight.meet()
            except BaseException as error:
                self.state = BROKEN
                self.failed(error)
                raise
        return self

    def compare(self, operation: Operation, timeout_seconds: float | None = None) -> None:
        """Wait until all ranks call this with the same operation. Raise as `collective` does."""
        with self.collective(operation, self._memory is not None, timeout_seconds):
            if self._memory is not None:
                self.meet()

    def begin(self, operation: Operation, timeout_seconds: float | None = None) -> int:
        """Take the lock, and return the token of the first meeting. Release it by `end` or `failed`.

        ``timeout_seconds`` is how long to wait for all ranks, which must have a limit too; infinite for none, by
        default the lock's. A limit costs a message to rank 0 and back. Raise TimeoutError if ranks do not come in
        time, and MismatchError on every rank if this one left a collective before and can tell. Raise RuntimeError if
        another thread is in a collective of this communicator, this one must not be, or the lock is broken.
        """
        thread = get_ident()  # before the lock is looked at: Python may run other threads after a call into C
        if forbidden_threads:
            refuse_thread(operation.name)
        if self.state:
            self._require_free(operation, thread, timeout_seconds)
        self.state = thread
        self.sequence = number = self.sequence + 1
        self.operation = operation
        self.is_shared_memory_only = True
        try:
            if self.flight is not None:
                self.flight.enter(operation, number)
            if timeout_seconds is not None or self.timeout_seconds is not None:
                self._wait_for_all(operation, timeout_seconds)
        except BaseException as error:  # also of a signal handler, where one of these functions begins
            self.state = BROKEN
            self.failed(error)
            raise
        return operation.token + (number & _NUMBERS)

    def _require_free(self, operation: Operation, thread: int, timeout_seconds: float | None) -> None:
        """Raise if the lock is broken or held, after telling the other ranks if that is possible."""
        state = self.state
        if state not in (BROKEN, thread):
            raise RuntimeError(
                f"rank {self.rank}: {operation.name} was called while another thread is in a collective of the "
                "same communicator: one thread at a time; give each thread a communicator (comm=) of its own"
            )
        if self.size == 1:
            return  # no other rank could be out of step
        if state == BROKEN and not self._given_up:
            self.failed(InterruptedError())  # which an interrupt has kept from its work
        if state == thread:
            raise RuntimeError(
                f"rank {self.rank}: {operation.name} was called in a collective of the same communicator "
                f"({self.operation}), by a signal handler perhaps; or that collective was interrupted: the ranks are "
                "not in step then, end the program"
            )
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        if self._tells and (limit is None or limit == math.inf):
            self.state = thread
            try:
                self._tell(operation)
            finally:
                self.state = BROKEN
        raise RuntimeError(f"rank {self.rank}: {operation.name} {self._given_up}")

    def _tell(self, operation: Operation) -> NoReturn:
        """Tell the other ranks of the node that this one has left a collective: all ranks raise."""
        memory = self._memory
        assert memory is not None
        # In a meeting where the tokens differed, this rank was interrupted before it told the other ranks what it does.
        if memory.meetings == self._settled or memory.agreed():
            memory.barrier_with_token(_OUT_OF_STEP | self.rank)
        self.disagree(operation)

    def end(self) -> None:
        """Release the lock that `begin` took: this rank has completed the collective."""
        if self.flight is not None:
            self.flight.leave()
        self.state = FREE

    def failed(self, error: BaseException) -> None:
        """Release the lock after an error: it is broken, unless the other ranks raise that error too."""
        if self.flight is not None:
            self.flight.leave()
        name = type(error).__name__
        flight_record.note(f"{self.operation.name}{call_site()} was left by {name}")
        if self.size > 1 and error is not self._of_all_ranks and not self._given_up:
            call = f"rank {self.rank}'s call {self.operation}{call_site()}"
            text = f"{call} (collective number {self.sequence}) was interrupted by {name}"
            self._interrupted = text
            self._tells = self.is_shared_memory_only and isinstance(self._agreement, NodeAgreement)
            if not self._tells:
                self.left = text
            article = "an" if name[0] in "AEIOU" else "a"
            self.give_up(f"after {article} {name} in the middle of a collective", text)
        self._of_all_ranks = None
        self.state = BROKEN if self._given_up else FREE

    def left_call(self, name: str, error: BaseException, sequence: int) -> None:
        """Record that an error left a call, so that it does not count; it began after ``sequence`` collectives.

        If all ranks leave it, they stay in step, else the next meeting tells them. Not for a `MismatchError`, which all
        raise.
        """
        flight_record.note(f"{name}{call_site()} was left by {type(error).__name__}")
        if self.sequence == sequence:
            return
        if self._is_left():
            self.failed(error)
        elif self.size > 1 and self.state == FREE:
            self._interrupted = (
                f"rank {self.rank}'s call {name}{call_site()} was interrupted by {type(error).__name__} after its "
                f"part in collective number {self.sequence}"
            )
            self.sequence = sequence

    def _wait_for_all(self, operation: Operation, timeout_seconds: float | None) -> None:
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        if seconds is None or seconds == math.inf or self.size == 1:
            return
        self.is_shared_memory_only = False  # this wait is by messages
        self._arrivals += 1
        try:
            agreement.wait_for_all(self._world, self._arrivals, seconds)
        except agreement.LateError as error:
            text = (
                f"rank {self.rank}: {operation}{call_site()} (collective number {self.sequence}): "
                f"{ranks_in_words(error.ranks)} of {self.size} did not come within {seconds:g} s"
            )
            self.give_up("after a time-out", text)
            raise TimedOutError(f"{text}; fix: see what these do, or allow more by timeout_seconds") from None
        self.is_shared_memory_only = True

    def give_up(self, when: str, text: str) -> None:
        """Break the lock: the ranks are not in step any more. ``text`` says what happened."""
        self.refuse(f"{when}: the ranks are not in step any more, end the program ({text})")

    def refuse(self, why: str) -> None:
        """Break the lock. ``why`` ends the sentence that every later collective raises."""
        self._given_up = why
        self.state = BROKEN

    def close(self, why: str) -> None:
        """Break the lock of a communicator that is freed, as `refuse` does, and drop what its ranks share."""
        self.refuse(why)
        if self.flight is not None and self.size > 1:
            self.flight.end()
        self._memory = None
        self.__dict__.pop("_agreement", None)

    @classmethod
    def refuse_new(cls, why: str) -> None:
        """Break the locks that are made from now on, as `refuse` does."""
        cls._given_up = why

    def _is_left(self) -> bool:
        """Return whether this thread has left a collective, and an interrupt has kept `failed` from its work."""
        return self.state == get_ident() or (self.state == BROKEN and not self._given_up)

    def reopen(self) -> None:
        """Free the lock at the end of the program, if the other ranks may still come to a collective with this one."""
        if self._is_left():
            self.failed(InterruptedError())
        if self.state == BROKEN and not self.left and not self._tells:
            self._given_up = ""
            self.state = FREE

    @property
    def given_up(self) -> str:
        """The reason why all further collectives are refused; empty if they are not."""
        return self._given_up if self.size > 1 else ""

    def meet(self, payload: Payload | None = None) -> None:
        """Wait for all ranks of the node, which share memory; in the first call of a collective all ranks agree.

        A payload is combined over all ranks, into the result of the memory. Raise MismatchError as `collective` does.
        """
        if payload is not None:
            agreed = self.combining(payload)(self._token if self._pending else self._token_of_next_meeting())
        elif self._pending:
            agreed = self._agreement.agree(self._token)
        else:
            # A rank that left this collective by an error must not be taken for one that is in it.
            assert self._memory is not None
            agreed = self._memory.barrier_with_token(self._token_of_next_meeting())
        self._pending = False
        if not agreed:
            self.disagree(self.operation)
        if self.flight is not None:
            self.flight.meet()

    def combining(self, payload: Payload) -> Callable[[int], bool]:
        """Return `meet` with this payload, prepared: it gets a token, and returns whether all ranks gave it."""
        assert isinstance(self._agreement, TwoTierAgreement)
        return self._agreement.combining(payload)

    def _token_of_next_meeting(self) -> int:
        self._meetings += 1
        return self.next_token(self._token, self._meetings)

    @staticmethod
    def next_token(token: int, meetings: int) -> int:
        """Return the token of a meeting after the first of a collective."""
        return token + (meetings & _MEETINGS) * _MEETING

    def __enter__(self) -> CollectiveLock:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.end()
        else:
            self.failed(error)

    def disagree(self, operation: Operation) -> NoReturn:
        """Raise the error that says what each rank does. Called by all ranks."""
        own_report = operation.name, str(operation), call_site(), self.sequence, self._interrupted, self._tells
        gathered: list[list[tuple[Any, ...]]] = []
        exchange = map(self._world.allgather, [own_report])
        try:
            # One call into C: if a signal handler raises, then after it, when all ranks have heard of each other.
            gathered.extend(exchange)
            error = self._disagreement(gathered[0])
        except BaseException:
            if gathered:
                self._disagreement(gathered[0])
            raise
        raise error

    def _disagreement(self, gathered: list[tuple[Any, ...]]) -> MismatchError:
        """Return the error of this rank. The ranks may go on if they are in step, else this one gives up."""
        reports = [RankReport(*fields) for fields in gathered]
        sequence = reports[self.rank].sequence
        in_step = all(report.sequence == sequence and not report.interrupted_in_it for report in reports)
        error = (mismatch if in_step else sequence_mismatch)(self.rank, sequence, reports)
        self.sequence = max(report.sequence for report in reports)
        if self._memory is not None:
            self._settled = self._memory.meetings
        if in_step:
            self.on_all_ranks(error)
        else:
            self._tells = False
            self.give_up("after an interrupted call", str(error))
        self.mismatches += 1
        return error

    def on_all_ranks(self, error: _Error) -> _Error:
        """Return an error that all ranks raise at the same place: it does not break the lock."""
        self._of_all_ranks = error
        return error


def ignoring_float_errors() -> Callable[..., Any]:
    """Return ``call(function, *arguments)``, which calls the function under ``numpy.errstate(all="ignore")``.

    MPI's sums do not report floating point errors either.

    ``call`` must not run in two threads at once, nor within itself. NumPy 2 keeps its settings in a context variable.
    Entering a context takes a twentieth of the time of changing the settings and restoring them.
    """
    context = contextvars.Context()
    with np.errstate(all="raise"):  # NumPy 1 keeps settings per thread, where the next line changes them
        context.run(np.seterr, all="ignore")
        return context.run if np.geterr()["over"] == "raise" else _under_errstate


def _under_errstate(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*arguments, **keywords)


# --- calls of several collectives -----------------------------------------------


_Function = TypeVar("_Function", bound=Callable[..., Any])


def collective_call(ranks_of: Callable[[Any], Any], name: str | None = None) -> Callable[[_Function], _Function]:
    """Decorate a method that communicates. ``ranks_of`` returns the topology of its object; messages call it ``name``.

    A signal handler may raise between two collectives of a call, or after the last. If the program repeats the call,
    the sequence number of this rank must differ from the others', so that all ranks raise.
    """

    def decorate(method: _Function) -> _Function:
        called = name or method.__name__

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            lock: CollectiveLock = ranks_of(self).lock
            sequence = lock.sequence
            try:
                return method(self, *args, **kwargs)
            except MismatchError:  # before `left_call`: a signal handler may raise where a function begins
                raise
            except BaseException as error:
                lock.left_call(called, error, sequence)
                raise

        return call  # type: ignore[return-value]

    return decorate
