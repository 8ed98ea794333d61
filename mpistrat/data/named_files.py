"""Files that are read because a data file names them, or because they lie in a folder that is searched.

A data file may name any file of the system. Opening a FIFO waits for ever, and a device may have no end. So each file
is looked at before a library opens it.
"""

from __future__ import annotations

import os
import stat

from mpistrat.data.errors import DataFileError
from mpistrat.runtime.environment import rc


def check(path: str, where: str = "") -> None:
    """Raise DataFileError unless a path is a regular file or folder in ``mpistrat.rc.data_root``, or does not exist."""
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
