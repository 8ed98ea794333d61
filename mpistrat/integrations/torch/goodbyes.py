"""Which ranks have ended their programs: no message of theirs will come.

A rank that ends tells all others, by messages without content on a communicator of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from mpistrat.process import mpi, program_end
from mpistrat.process.backoff import Backoff
from mpistrat.process.program_end import EndStep
from mpistrat.runtime.agreement.operation import TimedOutError

_TAG = 0  # on a communicator of its own
_LOOK = 1.0  # seconds of waiting between looks for ranks that have ended
_goodbyes: Goodbyes | None = None


class Goodbyes:
    """The goodbyes of all ranks of a job, on their communicator. Collective over them when it is made."""

    def __init__(self, world: Any):
        self._comm = world.Dup()
        self._ended: set[int] = set()
        self._sent: list[Any] = []
        program_end.register(EndStep.TORCH, self._say)

    def _say(self) -> None:
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        self._sent = [self._comm.isend(None, rank, _TAG) for rank in others]

    def came_from(self, ranks: set[int]) -> bool:
        """Return whether all of these ranks have said goodbye."""
        self._ended.update(rank for rank, _ in mpi.messages(self._comm, _TAG))
        return ranks <= self._ended


def begin(world: Any) -> None:
    """Let the ranks of the job say goodbye when they end. Collective over them; further calls do nothing."""
    global _goodbyes
    if _goodbyes is None:
        _goodbyes = Goodbyes(world)


def have_ended(ranks: Iterable[int]) -> bool:
    """Return whether these ranks of the job have all ended their programs, as far as is known; False for no ranks."""
    wanted = set(ranks)
    return _goodbyes is not None and bool(wanted) and _goodbyes.came_from(wanted)


def wait_until(
    done: Callable[[], bool],
    ended: Callable[[], bool],
    what: Callable[[], str],
    seconds: float,
    gone: str,
    backoff: Backoff | None = None,
) -> None:
    """Wait until ``done()``. ``ended()`` tells whether the ranks that can bring it about have ended.

    ``what()`` says what did not happen, for errors. Raise TimeoutError, with a text that begins so, after ``seconds``.
    Raise RuntimeError if these ranks have ended: its text ends with ``gone``.
    """
    start, pauses = time.monotonic(), backoff or Backoff()
    look, were_gone = _LOOK, False
    while not done():
        waited = time.monotonic() - start
        if waited > seconds:
            raise TimedOutError(f"{what()} within {seconds:g} s")
        if waited > look:
            if were_gone:  # since the last look: what they sent before has come
                raise RuntimeError(f"{what()}{gone}")
            were_gone, look = ended(), waited + _LOOK
        pauses.pause()
