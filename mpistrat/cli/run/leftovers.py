"""The removal of shared memory that killed ranks leave behind.

MPI libraries unlink their shared memory late, some only when the program ends. Left-over files use memory until the
machine restarts, and soon fill the small /dev/shm of a container.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from mpistrat.runtime.record import layout

# In order: MPICH, Open MPI 5, Open MPI 4, and this library, used if ranks may not open each other's files.
_NAMES = ("mpich_shm_", "sm_segment.", "vader_segment.", "mpistrat-")
SHARED = Path("/dev/shm")


def remove(since: float) -> list[Path]:
    """Remove shared memory of ranks that was made after the time ``since`` and that no process uses.

    Return the files that were removed.
    """
    found = _mine(since)
    if found:
        used = _used()
        found = [path for path in found if str(path) not in used]
    for path in found:
        with contextlib.suppress(OSError):
            path.unlink()
    return found


def _mine(since: float) -> list[Path]:
    try:
        entries = list(os.scandir(SHARED))
    except OSError:
        return []
    user = os.geteuid()
    found = []
    for entry in entries:
        if not entry.name.startswith(_NAMES) or entry.name.startswith(layout.PREFIX):
            continue  # a dead rank of a job that still runs is found by its record
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            if status.st_uid == user and status.st_ctime >= since:
                found.append(Path(entry.path))
    return found


def _used() -> set[str]:
    """Return the files in shared memory that processes of this user have open or map.

    A process of another job may just have made a file. It has the file open until it maps it, so its descriptors are
    looked at before its maps.
    """
    files = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    files.add(os.readlink(descriptor))
            for line in (process / "maps").read_bytes().splitlines():
                if b" /dev/shm/" in line:
                    files.add(os.fsdecode(line.split(maxsplit=5)[5].removesuffix(b" (deleted)")))
    return files
