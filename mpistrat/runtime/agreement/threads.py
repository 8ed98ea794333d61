"""Threads that must not start collectives: the read-ahead thread of a dataset, and those of replicas."""

from __future__ import annotations

import threading

#: Why each of these threads must not, by its identifier.
without: dict[int, str] = {}
MAKES_A_BATCH = (
    "was called while a batch was made, by a function given to map() perhaps: ranks read at their own pace, and would "
    "not meet; call it between batches, or use prefetch(0)"
)


def refuse(what: str) -> None:
    """Raise RuntimeError if this thread must not start the collective ``what``."""
    why = without.get(threading.get_ident())
    if why is not None:
        raise RuntimeError(f"{what} {why}")
