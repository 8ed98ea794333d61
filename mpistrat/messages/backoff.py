"""Waiting for messages without a busy core."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

_SPIN = 0.0005  # seconds in which a waiting rank only gives its core to others
_LONGEST = 0.002  # seconds; a poll costs about 10 us, so an idle rank uses less than 1 % of a core
# time.sleep(0) sleeps for the timer slack of Linux, 50 us, since CPython 3.11.
_give_way: Callable[[], object] = getattr(os, "sched_yield", partial(time.sleep, 0))


class Backoff:
    """Pauses that grow with the time for which a rank has waited.

    The first pauses are short, because an answer is usually near. Later ones are a tenth of the time waited, and at
    most 2 ms.
    """

    __slots__ = ("_start",)

    def __init__(self) -> None:
        self._start = 0.0

    def pause(self) -> None:
        """Pause before the next poll."""
        now = time.perf_counter()
        if not self._start:
            self._start = now
        waited = now - self._start
        if waited < _SPIN:
            _give_way()
        else:
            time.sleep(min(_LONGEST, waited / 10))

    def reset(self) -> None:
        """Begin again with short pauses: something arrived."""
        self._start = 0.0
