"""Threads that must not start collectives, such as the read-ahead thread of a dataset, and what threads run."""

from __future__ import annotations

import sys
import threading
from types import FrameType

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


def is_in(frame: FrameType) -> bool:
    """Return whether a thread runs the function of this frame, or one that it called."""
    for at in sys._current_frames().values():
        each: FrameType | None = at
        while each is not None:
            if each is frame:
                return True
            each = each.f_back
    return False
