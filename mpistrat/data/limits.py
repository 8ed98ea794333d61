"""Limits on what one data file may ask for: a few bytes may describe more than any memory holds."""

from __future__ import annotations

from mpistrat.data.errors import DataFileError
from mpistrat.runtime.environment import rc


def check_bytes(nbytes: int, where: str, what: str) -> None:
    """Raise DataFileError if what must be held in memory as a whole exceeds ``mpistrat.rc.data_block_bytes``."""
    if nbytes > rc.data_block_bytes:
        raise DataFileError(
            f"{where}: {what} has {nbytes} bytes, and MPISTRAT_DATA_BLOCK_BYTES={rc.data_block_bytes} is the limit; "
            "fix: write smaller ones, or raise the limit if you trust the file"
        )


def check_blocks(count: int, where: str) -> None:
    """Raise DataFileError if a table of more blocks than ``mpistrat.rc.data_blocks`` would be kept."""
    if count > rc.data_blocks:
        raise DataFileError(
            f"{where}: it has {count} chunks or more, and MPISTRAT_DATA_BLOCKS={rc.data_blocks} is the limit; fix: "
            "write larger ones, or raise the limit if you trust the file"
        )
