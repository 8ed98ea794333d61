"""Waiting without a busy core for messages, and with a limit for calls that may never return."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_SPIN = 0.0005  # seconds in which a waiting rank only gives its core to others
_SHORT, _LONGEST = 0.002, 0.01  # seconds; a poll and its sleep cost up to 50 us of a core
# time.sleep(0) sleeps for the timer slack of Linux, 50 us, since CPython 3.11.
_give_way: Callable[[], object] = getattr(os, "sched_yield", partial(time.sleep, 0))


class Backoff:
    """Pauses that grow with the time for which a rank has waited.

    The first pauses are short, because an answer is usually near. Later ones are a tenth of the time waited, up to
    2 ms. After a second they grow to 10 ms, as a 500th of the time waited. The ``longest`` pause, in seconds, is
    shorter where the poll itself lets MPI send the next piece of a message.
    """

    __slots__ = ("_longest", "_start")

    def __init__(self, longest: float = _LONGEST) -> None:
        self._start, self._longest = 0.0, longest

    def pause(self, sleep: Callable[[float], object] = time.sleep) -> float:
        """Pause before the next poll, and return the seconds for which this rank asked to sleep.

        ``sleep`` waits for some seconds, or less where there is news.
        """
        now = time.perf_counter()
        if not self._start:
            self._start = now
        waited = now - self._start
        if waited < _SPIN:
            _give_way()
            return 0.0
        seconds = min(waited / 10, max(_SHORT, waited / 500), self._longest)
        sleep(seconds)
        return seconds

    def reset(self) -> None:
        """Begin again with short pauses: something arrived."""
        self._start = 0.0


T = TypeVar("T")


def begin_call(pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    """Begin a call by a thread of a pool. Make it here if there are no more threads, as at the end of the program."""
    try:
        return pool.submit(call)
    except RuntimeError:
        from concurrent.futures import Future  # not by each `import mpistrat`

        future: Future[T] = Future()
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        return future


def within(seconds: float, function: Callable[[], T]) -> T:
    """Return what a function returns, which is called in a thread of its own.

    Raise TimeoutError if it takes longer. The thread stays behind.

    >>> within(5.0, lambda: 3)
    3
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="mpistrat-patience", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, and starts no thread any more
        return function()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
