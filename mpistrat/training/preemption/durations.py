"""The durations of steps and checkpoints, which tell when to stop before a time limit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_STEPS = 20


class StepTimes:
    """The durations of the last steps, and of the last checkpoint, by the clock ``now`` in seconds.

    The first step is often slow (compilation, cold caches). It counts only until the second step.

    Examples
    --------
    >>> ticks = iter([0, 100, 101, 103])
    >>> times = StepTimes(lambda: next(ticks))
    >>> needed = []
    >>> for _ in range(4):
    ...     times.check()
    ...     needed.append(times.needed)
    >>> needed
    [0.0, 200.0, 2.0, 4.0]
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._last: float | None = None  # time of the last check or save
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._first_step_only = True
        self._save = 0.0

    @property
    def is_known(self) -> bool:
        """Whether the duration of a step is known."""
        return bool(self._steps)

    @property
    def needed(self) -> float:
        """The seconds for another step and a checkpoint, doubled as a reserve."""
        return 2 * (self._save + max(self._steps, default=0.0))

    def check(self) -> None:
        """Record the time since the last check or save as a step."""
        now = self._now()
        if self._last is not None:
            if self._first_step_only and self._steps:
                self._steps.clear()
                self._first_step_only = False
            self._steps.append(now - self._last)
        self._last = now

    def saved(self, seconds: float) -> None:
        """Record the duration of a checkpoint, which is not a part of the next step."""
        self._save = seconds
        self._last = self._now()

    def begin_anew(self) -> None:
        """Do not count the time until the next check as a step."""
        self._last = None
