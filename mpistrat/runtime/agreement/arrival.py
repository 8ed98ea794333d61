"""A wait for all ranks with a time limit."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpistrat.process import mpi
from mpistrat.process.waiting import Backoff

_COME, _GO = 1, 2  # tags
_ALL_HERE, _TIME_IS_UP = -1, -2
_GRACE = 1.0  # seconds that rank 0 may take to answer


class LateError(Exception):
    """Ranks that did not arrive within the time limit, or rank 0 if the others wait for it."""

    def __init__(self, ranks: tuple[int, ...]):
        super().__init__(ranks)
        self.ranks = ranks


def wait_for_all(world: Any, sequence: int, seconds: float) -> None:
    """Wait until all ranks have called this with the same number, by messages to rank 0 that never block.

    Raise LateError on every rank that arrived, when one of them has waited for ``seconds``.
    """
    (_as_first if world.rank == 0 else _as_other)(world, sequence, time.monotonic() + seconds)


def _as_first(world: Any, sequence: int, deadline: float) -> None:
    here = {0}
    late = False
    backoff = Backoff()
    while True:
        heard = _hear(world, sequence)
        if heard is None:
            # Decide only after all messages are read: a rank that arrived may have given up since.
            if late or len(here) == world.size or time.monotonic() > deadline:
                break
            backoff.pause()
        else:
            rank, gave_up = heard
            here.add(rank)
            late = late or gave_up
            backoff.reset()
    missing = sorted(set(range(world.size)) - here)
    if late and not missing:
        missing = [0]
    answer = np.array([sequence, *missing, _TIME_IS_UP if missing else _ALL_HERE], np.int64)
    for sent in [world.Isend(answer, rank, _GO) for rank in sorted(here - {0})]:
        sent.Wait()
    if missing:
        raise LateError(tuple(missing))


def _hear(world: Any, sequence: int) -> tuple[int, bool] | None:
    """Return the next rank that reported and whether it gave up, or None without a message."""
    from mpi4py import MPI

    status, word = MPI.Status(), np.empty(2, np.int64)
    while mpi.has_come(world, MPI.ANY_SOURCE, _COME, status):
        world.Recv(word, status.source, _COME)
        if word[0] == sequence:  # other numbers belong to earlier calls
            return status.source, bool(word[1])
    return None


def _as_other(world: Any, sequence: int, deadline: float) -> None:
    from mpi4py import MPI

    world.Isend(np.array([sequence, 0], np.int64), 0, _COME).Wait()
    answer = np.empty(world.size + 1, np.int64)
    asked, slept, backoff = False, 0.0, Backoff()
    while True:
        status = MPI.Status()
        if mpi.has_come(world, 0, _GO, status):
            world.Recv(answer, 0, _GO)
            if answer[0] != sequence:
                continue
            ranks = answer[1 : status.Get_count(MPI.INT64_T)].tolist()
            if ranks.pop() == _ALL_HERE:
                return
            raise LateError(tuple(ranks))
        if asked:
            if slept > _GRACE:
                raise LateError((0,))
            slept += backoff.pause()  # not the time: all processes of a machine may have been stopped meanwhile
        elif time.monotonic() > deadline:
            asked = True
            world.Isend(np.array([sequence, 1], np.int64), 0, _COME).Wait()
        else:
            backoff.pause()
