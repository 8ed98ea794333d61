"""What the workers of a coordinator have done."""

from __future__ import annotations

import time
from typing import NamedTuple


class WorkerStatistics(NamedTuple):
    """What one worker has done.

    Attributes
    ----------
    rank : int
    ended : int
        Number of calls that ended, also with an error.
    failed : int
        Number of calls that raised an error.
    busy_seconds : float
        Time in functions.
    lost : bool
        Whether the rank is lost.
    """

    rank: int
    ended: int
    failed: int
    busy_seconds: float
    lost: bool = False


class Statistics(NamedTuple):
    """What the workers have done since the first call was queued.

    Attributes
    ----------
    waiting : int
        Number of calls that no worker has.
    running : int
        Number of calls that a worker has.
    ended : int
        Number of calls that ended, also with an error. A call of several ranks counts once on each.
    seconds : float
        Time from the first call until the last one that ended, or until now if one is waiting or running.
    workers : tuple of WorkerStatistics
        One for each worker.
    """

    waiting: int
    running: int
    ended: int
    seconds: float
    workers: tuple[WorkerStatistics, ...]

    @property
    def per_second(self) -> float:
        """Calls that ended per second."""
        return self.ended / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.ended} calls ended in {self.seconds:.1f} s ({self.per_second:.4g} per second), {self.running} "
            f"running, {self.waiting} waiting"
        ]
        for worker in self.workers:
            share = worker.busy_seconds / self.seconds if self.seconds else 0.0
            lines.append(
                f"  rank {worker.rank}: {worker.ended} ended, {worker.failed} failed, busy {share:.0%}"
                f"{', lost' if worker.lost else ''}"
            )
        return "\n".join(lines)


class Clock:
    """The time during which calls were open."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0

    def start(self) -> None:
        """Note that a call was queued."""
        if self._first is None:
            self._first = time.monotonic()

    def note(self) -> None:
        """Note that a call ended."""
        self._last = time.monotonic()

    def seconds(self, still: bool) -> float:
        """Return the seconds from the first call until now if calls are open, or until the last one ended."""
        if self._first is None:
            return 0.0
        return (time.monotonic() if still else self._last) - self._first
