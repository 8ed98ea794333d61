"""Limits on what one data file may ask for: a few bytes may name more than any memory holds, or any file."""

from __future__ import annotations

import os
import stat

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


def check_path(path: str, where: str = "") -> None:
    """Raise DataFileError unless a path is a regular file or folder in ``mpistrat.rc.data_root``, or does not exist."""
    # A data file may name any file of the system. Opening a FIFO waits for ever, and a device may have no end.
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # the code that opens it has a better message
        return
    where = where or f"file {path!r}"
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataFileError(f"{where}: {path!r} is not a regular file; fix: check where it is from")
    root = rc.data_root
    real = os.path.realpath(root)
    if root and os.path.commonpath([os.path.realpath(path), real]) != real:
        raise DataFileError(
            f"{where}: {path!r} is outside of MPISTRAT_DATA_ROOT={root}; fix: move it there, or name another folder"
        )
