"""The end of a job: the order in which its ranks end, the launcher without its parent, and what ranks leave behind.

MPI libraries unlink their shared memory late, some only when the program ends. Left-over files use memory until the
machine restarts, and soon fill the small /dev/shm of a container.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

from mpistrat.record import layout

_CLOSES_DOWNWARD = (4, 4)  # the Linux since which a process that ends closes its last files first
_CLOSED = 0x8  # IN_CLOSE_WRITE
_EVENT = struct.Struct("iIII")  # then a name of as many bytes as the last number says
# Without signals of the terminal. The pipe on its input ends with the process that started it.
_GUARD = 'trap "" HUP INT QUIT TERM; read process; while read _; do :; done; kill -s "$0" "$process" 2>/dev/null'
# In order: MPICH, Open MPI 5, Open MPI 4, and this library, used if ranks may not open each other's files.
_SHARED_NAMES = ("mpich_shm_", "sm_segment.", "vader_segment.", "mpistrat-")
SHARED = Path("/dev/shm")


class EndOrder:
    """The order in which the ranks of a job end.

    MPICH kills all ranks a few milliseconds after the first one, and does not report which one that was. Each rank
    keeps a file open (`mpistrat.record.end_mark`), and Linux queues a notice when it is closed (inotify). So one look
    at the end of the job is enough. The order in which processes exit is not: on a busy machine the first one may still
    be exiting when the launcher has killed others. The order is empty if inotify is unavailable.

    The directory of these files exists, and holds nothing else.
    """

    def __init__(self, folder: Path):
        self._notices: int | None = None
        if sys.platform == "linux" and _version() >= _CLOSES_DOWNWARD:
            system = ctypes.CDLL(None)
            notices = system.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if notices >= 0:  # this user may have too many
                self._notices = notices
                system.inotify_add_watch(notices, os.fsencode(folder), _CLOSED)

    def close(self) -> list[int]:
        """Return the processes that have ended, the first one first."""
        if self._notices is None:
            return []
        told = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._notices, 1 << 16):
                told += part
        os.close(self._notices)
        self._notices = None
        return _processes(told)


def _processes(told: bytes) -> list[int]:
    """Return the numbers that are the names in notices."""
    found, at = [], 0
    while at < len(told):
        _, _, _, length = _EVENT.unpack_from(told, at)
        at += _EVENT.size
        name = told[at : at + length].rstrip(b"\0")
        at += length
        # Others: the directory itself, and what a file system makes of a file that is removed.
        if name.isdigit():
            found.append(int(name))
    return found


def _version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))


class Guard:
    """A process that sends one signal to the launcher when this process dies, however it dies.

    Linux could send the signal (``PR_SET_PDEATHSIG``), but sends it once for each thread of the dead process. At a
    second signal the launcher of Open MPI ends at once, and its ranks go on without it. The signal ``number`` must end
    the launcher and its ranks.
    """

    def __init__(self, number: signal.Signals):
        source, self._target = os.pipe()
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, number.name[len("SIG") :]],
            stdin=source,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(source)

    def watch_this_process(self) -> None:
        """Make the calling process the guarded one, with a process group of its own.

        The launcher calls it before its program begins. Signals of the terminal reach it through `mpistrat run` only.
        """
        os.setpgid(0, 0)
        os.write(self._target, b"%d\n" % os.getpid())

    def end(self) -> None:
        """End the guard after the launcher has ended."""
        self._process.kill()
        self._process.wait()
        os.close(self._target)


def remove_leftovers(since: float) -> list[Path]:
    """Remove, and return, files of ranks in shared memory that are newer than ``since`` and that no process uses."""
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
        if not entry.name.startswith(_SHARED_NAMES) or entry.name.startswith(layout.PREFIX):
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
