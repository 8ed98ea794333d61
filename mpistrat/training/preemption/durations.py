"""How long steps and checkpoints take, as far as the end of a job's time depends on it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_STEPS = 20


class Pace:
    """Durations of the last steps, and of the last checkpoint.

    The first step, which compiles, fills caches and so on, counts only until there is another one.

    Parameters
    ----------
    now : callable
        The clock.

    Examples
    --------
    >>> ticks = iter([0, 100, 101, 103])
    >>> pace = Pace(lambda: next(ticks))
    >>> needed = []
    >>> for _ in range(4):
    ...     pace.check()
    ...     needed.append(pace.needed)
    >>> needed
    [0.0, 200.0, 2.0, 4.0]
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._last: float | None = None  # when the ranks last met, or saved
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._first_step_only = True
        self._save = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there was a step."""
        return bool(self._steps)

    @property
    def needed(self) -> float:
        """Seconds for another step and a checkpoint, with some reserve."""
        return 2 * (self._save + max(self._steps, default=0.0))

    def check(self) -> None:
        """The ranks meet: what passed since they last did was a step."""
        now = self._now()
        if self._last is not None:
            if self._first_step_only and self._steps:
                self._steps.clear()
                self._first_step_only = False
            self._steps.append(now - self._last)
        self._last = now

    def saved(self, seconds: float) -> None:
        """A checkpoint was written, which is not a part of the next step."""
        self._save = seconds
        self._last = self._now()

    def begin_anew(self) -> None:
        """What comes now is not a step."""
        self._last = None
