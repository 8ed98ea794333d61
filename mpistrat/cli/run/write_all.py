"""Writing to a descriptor that may be full, or whose reader may have ended."""

from __future__ import annotations

import os
import select


def write_all(target: int, data: bytes) -> OSError | None:
    """Write bytes, and wait while the descriptor is full. Return the error if it cannot be written to."""
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:
            select.select([], [target], [])
        except OSError as error:
            return error
    return None
