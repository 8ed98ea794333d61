"""Errors that travel to another rank, with the traceback of the rank that raised them, and ranks that were lost.

A lost rank is one whose process has died. With ULFM (``mpirun --with-ft ulfm``) the other ranks go on, and MPI calls
raise an error that names the lost ranks. Without it the launcher ends all ranks, so no rank is ever lost here.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from mpistrat.process import failure, mpi

_MOST_UNTIL_TOLD = 3.0  # seconds from the first error of a message until MPI names the lost rank
_NAP = 0.01


class RemoteTraceback(Exception):
    """The cause of an error of another rank: where it was raised there."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


class Failure(NamedTuple):
    """An error of another rank."""

    pickled: bytes | None  # the exception; None if it cannot be sent
    summary: str  # its class and message
    where: str  # the rank and its role
    text: str  # its traceback

    def error(self) -> BaseException:
        """Return the exception. Its cause shows the other rank and its traceback."""
        made: BaseException
        try:
            made = RuntimeError(self.summary) if self.pickled is None else pickle.loads(self.pickled)
        except Exception:  # the class takes other arguments than those it keeps
            made = RuntimeError(self.summary)
        made.__cause__ = RemoteTraceback(f"\non {self.where}:\n{self.text}")
        return made


def failure_of(error: BaseException, where: str) -> Failure:
    """Return an error as it is sent. SystemExit and the like become RuntimeError; KeyboardInterrupt stays."""
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    pickled = None
    if isinstance(error, (Exception, KeyboardInterrupt)):
        import cloudpickle

        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = None
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(pickled, summary, where, text)


class LostRankError(RuntimeError):
    """A rank was lost that this one needs.

    Attributes
    ----------
    rank : int
        The lost rank.

    Examples
    --------
    >>> raise LostRankError("ps 0 (rank 6) was lost: load the last checkpoint in a new job", 6)
    Traceback (most recent call last):
    mpistrat.messages.failures.LostRankError: ps 0 (rank 6) was lost: load the last checkpoint in a new job
    """

    def __init__(self, text: str, rank: int):
        super().__init__(text, rank)
        self.text, self.rank = text, rank

    def __str__(self) -> str:
        return self.text


class Losses:
    """The lost ranks of a communicator. ``survived`` says whether the other ranks go on after a loss."""

    def __init__(self, comm: Any, name: Callable[[int], str]):
        self._comm, self._name = comm, name
        self.ranks: set[int] = set()
        self.survived = mpi.survives_losses()
        if self.survived:
            failure.revoke_at_end(comm)
            mpi.leave_without_finalize()

    def note(self, error: Any) -> None:
        """Note the lost ranks that an MPI error is about, or raise it. End this rank if another one ends the job."""
        MPI, kind = mpi.start(), error.Get_error_class()
        if self.survived and kind == MPI.ERR_REVOKED:
            failure.end_job("")
        if not self.survived:
            raise error
        lost = self._lost()
        if kind not in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING):
            # A connection that breaks is often the first sign of a loss: in 5 of 20 runs MPI_ERR_OTHER came first.
            # The launcher tells of the loss soon after.
            end = time.monotonic() + _MOST_UNTIL_TOLD
            while lost <= self.ranks and time.monotonic() < end:
                time.sleep(_NAP)
                with contextlib.suppress(MPI.Exception):
                    self._comm.Iprobe(MPI.ANY_SOURCE)  # MPI learns of losses while it is called
                lost = self._lost()
            if lost <= self.ranks:
                raise error
        self.ranks.update(lost)

    def _lost(self) -> set[int]:
        """Return the ranks that MPI knows to have failed, and let it receive from any source again."""
        failed, own = self._comm.Get_failed(), self._comm.Get_group()
        try:
            lost = type(failed).Translate_ranks(failed, list(range(failed.size)), own)
            self._comm.Ack_failed(failed.size)
        finally:
            failed.Free()
            own.Free()
        return set(lost)

    def error(self, rank: int) -> LostRankError:
        return LostRankError(f"{self._name(rank)} was lost: its process has died, or its node", rank)
