"""Statistics and a progress bar of the calls of a coordinator or an executor."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from mpistrat.runtime.environment import rc

_EVERY = 60.0  # seconds between lines in a log


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
        if self._first is None:
            self._first = time.monotonic()

    def note(self) -> None:
        self._last = time.monotonic()

    def seconds(self, still: bool) -> float:
        """Return the seconds from the first call until now if calls are open, or until the last one ended."""
        if self._first is None:
            return 0.0
        return (time.monotonic() if still else self._last) - self._first


class CallsBar:
    """A bar on a terminal, or a line a minute in a log. ``rc.progress`` may turn it off."""

    def __init__(self, shown: bool):
        self.shown = shown
        self._bar: Any = None

    def queued(self, calls: int = 1, kept: int = 0) -> None:
        if not self.shown or rc.progress is False:
            return
        if self._bar is None:
            from mpistrat.runtime.progress import progress_of  # imports tqdm

            self._bar = progress_of(None, True, rc.progress, _EVERY, "calls", 0, "call")
        # tqdm takes ``initial`` only at its creation: kept calls count as done, but not for the speed.
        self._bar.total += calls
        self._bar.initial += kept
        self._bar.last_print_n += kept
        self._bar.n += kept

    def ended(self, calls: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(calls)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
