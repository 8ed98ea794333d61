"""Threads that must not start collectives, such as the read-ahead thread of a dataset."""

from __future__ import annotations

import threading

without: set[int] = set()  # identifiers of these threads


def refuse(what: str) -> None:
    """Raise if this thread must not start the collective ``what``.

    Raises
    ------
    RuntimeError
        In a read-ahead thread, and in another one while it makes a batch in its place.
    """
    if without and threading.get_ident() in without:
        raise RuntimeError(
            f"{what} was called while a batch was made, by a function given to map() perhaps: ranks read at their "
            "own pace, and would not meet; call it between batches, or use prefetch(0)"
        )
