"""Log records that carry the rank."""

from __future__ import annotations

import logging
from typing import Any

_known = False


def set_rank(rank: int, size: int) -> None:
    """Add the attributes ``rank`` and ``size`` to all later log records, for ``%(rank)d`` in a format."""
    global _known
    if _known:
        return
    _known = True
    previous = logging.getLogRecordFactory()

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = previous(*args, **kwargs)
        record.rank, record.size = rank, size
        return record

    logging.setLogRecordFactory(factory)
