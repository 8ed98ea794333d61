"""A limit for the wait for calls that may never return, as those of a file system that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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
