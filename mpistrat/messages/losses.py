"""The ranks of a communicator that were lost: their processes have died.

With ULFM (``mpirun --with-ft ulfm``) the other ranks go on, and MPI calls raise an error that names the lost ranks.
Without it the launcher ends all ranks, so no rank is ever lost here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from mpistrat.process import failure, mpi

_MOST_UNTIL_TOLD = 3.0  # seconds from the first error of a message until MPI names the lost rank
_NAP = 0.01


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
    mpistrat.messages.losses.LostRankError: ps 0 (rank 6) was lost: load the last checkpoint in a new job
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
