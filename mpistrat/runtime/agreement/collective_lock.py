"""One collective of a communicator at a time, and all ranks in the same one.

Who makes a collective takes the turn, and the ranks agree that they are all in it. From then on each of their
meetings carries its number, so that one which has left is not taken for one that is there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from mpistrat.runtime.agreement import arrival, threads
from mpistrat.runtime.agreement.abandoned import anyone_in_turn
from mpistrat.runtime.agreement.agreement import Agreement, Payload, TwoTierAgreement
from mpistrat.runtime.agreement.operation import (
    MismatchError,
    Operation,
    Said,
    call_site,
    mismatch,
    ranks_in_words,
)
from mpistrat.runtime.memory.node import NodeMemory
from mpistrat.runtime.process import float_errors

_Error = TypeVar("_Error", bound=BaseException)


class Turns:
    """What the collectives of a communicator have in common.

    Attributes
    ----------
    size, rank, nodes, world
        As of `Topology`, which is one.
    sequence : int
        How many collectives were entered so far.
    memory : NodeMemory or None
        What the ranks of this node share; None on all ranks if those of one node cannot.
    only_meets : bool
        Whether the ranks wait for each other in `meet` alone until this turn ends: on one node they then notice one
        that has left it. `turn` takes it from ``meets``; for the one who holds the turn to correct.
    compares_places, compares_variables : bool
        Whether the ranks compare also the lines that call collectives, and the copies of variables (``rc.debug``).
    end : callable
        Gives the turn back that `begin` took.
    ignoring_float_errors : callable
        ``call(function, *arguments)`` without floating point errors. For the one who holds the turn.
    """

    size: int
    rank: int
    nodes: tuple[tuple[int, ...], ...]
    world: Any
    memory: NodeMemory | None = None
    only_meets = False
    compares_places = False
    compares_variables = False
    _agreement: Agreement
    _pending = False
    _met = False
    _operation: Operation
    _meetings = 0  # of this turn, after the first
    _given_up = ""
    _left = ""

    def __init__(self) -> None:
        self.sequence = 0
        self._turn = threading.Lock()
        self.end = self._turn.release
        self.ignoring_float_errors = float_errors.ignoring()

    def turn(self, operation: Operation, meets: bool = False, timeout_seconds: float | None = None) -> Turns:
        """Context in which this thread makes the collective that ``operation`` describes.

        The ranks compare checksums of the description first, which makes those that disagree raise instead of
        hang or compute nonsense.

        Parameters
        ----------
        operation : Operation
        meets : bool
            The caller calls `meet` itself, before all other communication: once it has laid down in the
            memory of the node what the others then read.
        timeout_seconds : float, optional
            How long to wait for the other ranks, which must be given a limit too. Costs a message of every rank
            to rank 0 and back.

        Raises
        ------
        MismatchError
            On every rank, if the ranks are not all in the same operation, or one has ended its program.
        TimeoutError
            If some ranks do not come in time. No collective of this communicator works from then on.
        RuntimeError
            If another thread is in a collective of this communicator, this one reads ahead, or a collective was
            given up before.
        """
        self.begin(operation)
        if self.size > 1:
            if timeout_seconds is not None:
                self._wait_for_all(operation, timeout_seconds)
            if self.compares_places:
                operation = Operation(
                    operation.name, *operation.parts, f"number {self.sequence}{call_site()}"
                )
            self._operation = operation
            self._meetings = 0
            self.only_meets = meets
            if meets:
                self._pending = True
                return self
            self._met = True
            try:
                if not self._agreement.agree(operation):
                    self.disagree(operation)
            except BaseException as error:
                self.__exit__(type(error))
                raise
        return self

    def begin(self, operation: Operation) -> None:
        """Take the turn without waiting for anybody, for one who then lets the ranks agree. Ends with `end`.

        Raises
        ------
        RuntimeError
            As `turn`.
        """
        if threads.without:
            threads.refuse(operation.name)
        if not self._turn.acquire(False):
            self._take_over(operation)
        self.sequence += 1
        if self._given_up and self.size > 1:
            self._turn.release()
            raise RuntimeError(f"rank {self.rank}: {operation.name} {self._given_up}")

    def _take_over(self, operation: Operation) -> None:
        """Take the turn although it is taken, if an interrupt left it so."""
        caller: Any = sys._getframe(2)
        if caller.f_code is Turns.turn.__code__:
            caller = caller.f_back
        for _ in range(2):
            if anyone_in_turn(caller):
                raise RuntimeError(
                    f"rank {self.rank}: {operation.name} was called while another thread is in a collective of the "
                    "same communicator: one thread at a time; give each thread a communicator (comm=) of its own"
                )
            if self._turn.acquire(False):  # somebody gave it back since
                return
        self._pending = self._met = False

    def _wait_for_all(self, operation: Operation, seconds: float) -> None:
        try:
            arrival.wait_for_all(self.world, self.sequence, seconds)
        except arrival.LateError as error:
            text = (
                f"rank {self.rank}: {operation}{call_site()} (collective number {self.sequence}): "
                f"{ranks_in_words(error.ranks)} of {self.size} did not come within {seconds:g} s"
            )
            self.give_up("after a time-out", text)
            self._turn.release()
            raise TimeoutError(f"{text}; fix: see what these do, or allow more by timeout_seconds") from None
        except BaseException:
            self._turn.release()
            raise

    def give_up(self, when: str, text: str) -> None:
        """Refuse all further collectives: the ranks are not in step any more. ``text`` says what happened."""
        self._given_up = f"{when}: the ranks are not in step any more, end the program ({text})"

    @property
    def given_up(self) -> str:
        """Why all further collectives are refused; empty if they are not."""
        return self._given_up if self.size > 1 else ""

    def meet(self, payload: Payload | None = None) -> None:
        """Wait for all ranks of the node; in the first call of a turn for all ranks, which agree then.

        Only where they have `memory`. A payload is combined over all ranks, into the result of the memory.

        Raises
        ------
        MismatchError
            As `turn`.
        """
        if self._pending:
            self._met = True
        if payload is not None:
            if not self._pending:
                self._meetings += 1
            word = self._operation.word | self._meetings << 33
            agreed = self.combining(word, payload)()
        elif self._pending:
            agreed = self._agreement.agree(self._operation)
        else:
            self._meet_again()
            return
        self._pending = False
        if not agreed:
            self.disagree(self._operation)

    def combining(self, word: int, payload: Payload) -> Callable[[], bool]:
        """`meet` with this payload, for one who has begun with `begin`: whether all ranks said this word."""
        assert isinstance(self._agreement, TwoTierAgreement)
        return self._agreement.combining(word, payload)

    def _meet_again(self) -> None:
        """The next barrier of a turn: a rank that has left it by an error must not be taken for one that is in it."""
        memory = self.memory
        assert memory is not None
        self._meetings += 1
        word = self._operation.word | self._meetings << 33
        if memory.meet_saying(word) != word.to_bytes(8, sys.byteorder) * memory.size:
            self.disagree(self._operation)

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None and self._met and not self._given_up and not issubclass(kind, MismatchError):
            noticed = self.only_meets and len(self.nodes) == 1
            if not noticed:
                self.left(self._operation, kind)
        self._met = False
        self._pending = False
        self._turn.release()

    def disagree(self, operation: Operation) -> NoReturn:
        """Raise the error that says what each rank does. Called by all ranks."""
        said = self.world.allgather(Said(operation.name, str(operation), call_site()))
        raise mismatch(self.rank, self.sequence, said)

    def left(self, operation: Operation, kind: type[BaseException]) -> None:
        """Note that this rank left a collective by an error of its own, where the others may wait for it for ever."""
        self._left = f"rank {self.rank} left {operation} by a {kind.__name__}"
        self.give_up(f"after a {kind.__name__} in the middle of a collective", self._left)

    def on_all_ranks(self, error: _Error) -> _Error:
        """An error that all ranks raise in this turn, at the same place: nobody waits for one that has left."""
        self._met = False
        return error
