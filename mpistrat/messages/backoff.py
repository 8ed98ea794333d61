"""Waiting for messages without a busy core."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

_SPIN = 0.0005  # seconds in which a waiting rank only gives its core to others
_SHORT, _LONGEST = 0.002, 0.01  # seconds; a poll and its sleep cost up to 50 us of a core
# time.sleep(0) sleeps for the timer slack of Linux, 50 us, since CPython 3.11.
_give_way: Callable[[], object] = getattr(os, "sched_yield", partial(time.sleep, 0))


class Backoff:
    """Pauses that grow with the time for which a rank has waited.

    The first pauses are short, because an answer is usually near. Later ones are a tenth of the time waited, up to
    2 ms. After a second they grow to 10 ms, as a 500th of the time waited.
    """

    __slots__ = ("_start",)

    def __init__(self) -> None:
        self._start = 0.0

    def pause(self, sleep: Callable[[float], object] = time.sleep) -> None:
        """Pause before the next poll. ``sleep`` waits for some seconds, or less where there is news."""
        now = time.perf_counter()
        if not self._start:
            self._start = now
        waited = now - self._start
        if waited < _SPIN:
            _give_way()
        else:
            sleep(min(waited / 10, max(_SHORT, waited / 500), _LONGEST))

    def reset(self) -> None:
        """Begin again with short pauses: something arrived."""
        self._start = 0.0
