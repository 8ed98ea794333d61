"""A time limit for a function in the main thread."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

from mpistrat.messages.post import Post

_LONGEST = 1e9  # seconds, 30 years: a timer does not take any number
_AGAIN = 0.001  # seconds until the next attempt, if the function is within a letter


_UNLIMITED = nullcontext()


def time_limit(seconds: float | None, post: Post) -> AbstractContextManager[None]:
    """Raise TimeoutError in the block after some seconds, between two steps of Python.

    A letter that the block sends or receives is not interrupted: it would be lost. Python ignores an error that is
    raised in a destructor or a callback of a weak reference: then the error is raised again.
    """
    return _UNLIMITED if seconds is None else _limited(seconds, post)


@contextmanager
def _limited(seconds: float, post: Post) -> Iterator[None]:
    error = TimeoutError(f"the function runs for more than {seconds:g} s, its time limit")

    def interrupt(number: int, frame: FrameType | None) -> None:
        if post.between_letters:
            raise error
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)

    def ignored(unraisable: Any) -> None:
        if unraisable.exc_value is error:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        else:
            report(unraisable)

    report, sys.unraisablehook = sys.unraisablehook, ignored
    before: Any = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, _LONGEST))
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # also if the limit is met between the two
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = report
