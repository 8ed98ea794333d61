"""Shared memory that ranks leave behind when they are killed: MPI libraries unlink it late, some only at their end.

It is memory until the machine restarts, and a container with little of it soon has none.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# MPICH; Open MPI 5; Open MPI 4; this library, where ranks may not open each other's files
_NAMES = ("mpich_shm_", "sm_segment.", "vader_segment.", "mpistrat-")
_SHARED = Path("/dev/shm")


def remove(since: float) -> list[Path]:
    """Remove the shared memory of ranks that was made after a time and that no process maps.

    Parameters
    ----------
    since : float
        Seconds since the epoch.

    Returns
    -------
    list of pathlib.Path
        What was removed.
    """
    found = _mine(since)
    # Twice: a process of another job, that has just made its own, maps it by then.
    for _ in range(2):
        if found:
            used = _mapped()
            found = [path for path in found if str(path) not in used]
    for path in found:
        with contextlib.suppress(OSError):
            path.unlink()
    return found


def _mine(since: float) -> list[Path]:
    try:
        entries = list(os.scandir(_SHARED))
    except OSError:
        return []
    user = os.geteuid()
    found = []
    for entry in entries:
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            if entry.name.startswith(_NAMES) and status.st_uid == user and status.st_ctime >= since:
                found.append(Path(entry.path))
    return found


def _mapped() -> set[str]:
    """The files in shared memory that processes of this user map."""
    files = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            for line in maps.read_bytes().splitlines():
                if b" /dev/shm/" in line:
                    files.add(os.fsdecode(line.split(maxsplit=5)[5].removesuffix(b" (deleted)")))
    return files
