"""Threads that must not start collectives, such as the read-ahead thread of a dataset."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

without: set[int] = set()  # identifiers of these threads


@contextlib.contextmanager
def without_collectives() -> Iterator[None]:
    """Refuse collectives in this thread inside the block."""
    this = threading.get_ident()
    if this in without:
        yield
        return
    without.add(this)
    try:
        yield
    finally:
        without.discard(this)


def refuse(what: str) -> None:
    """Raise if this thread must not start the collective ``what``.

    Raises
    ------
    RuntimeError
        In a read-ahead thread.
    """
    if without and threading.get_ident() in without:
        raise RuntimeError(
            f"{what} was called in the thread that reads ahead, by a function given to map() perhaps: ranks read "
            "at their own pace, and would not meet; call it in the main program, or use prefetch(0)"
        )
