"""Log records that carry the rank."""

from __future__ import annotations

import logging


class _Rank(logging.Filter):
    """Adds ``rank`` and ``size`` to a record, and says the rank in its text where there are several."""

    rank = 0
    size = 1

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank, record.size = self.rank, self.size
        if self.size > 1:
            record.msg = f"[rank {self.rank}] {record.msg}"
        return True


_filter = _Rank()


def get_logger(name: str) -> logging.Logger:
    """The logger ``name`` (below ``mpistrat``), whose records carry the rank."""
    logger = logging.getLogger(name)
    logger.addFilter(_filter)
    return logger


def set_rank(rank: int, size: int) -> None:
    """Say who this process is, once that is known."""
    _filter.rank, _filter.size = rank, size
