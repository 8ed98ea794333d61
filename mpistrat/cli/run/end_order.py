"""The order in which the ranks of a job end, as the system keeps it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
import sys
from pathlib import Path

_CLOSES_DOWNWARD = (4, 4)  # the Linux since which a process that ends closes its last files first
_CLOSED = 0x8  # IN_CLOSE_WRITE
_EVENT = struct.Struct("iIII")  # then a name of as many bytes as the last number says


class EndOrder:
    """The order in which the ranks of a job end.

    MPICH kills all ranks a few milliseconds after the first one, and does not report which one that was. Each rank
    keeps a file open (`mpistrat.runtime.record.end_mark`), and Linux queues a notice when it is closed (inotify). So
    one look at the end of the job is enough. The order in which processes exit is not: on a busy machine the first
    one may still be exiting when the launcher has killed others. The order is empty if inotify is unavailable.

    Parameters
    ----------
    folder : pathlib.Path
        The directory of these files: exists, and holds nothing else.
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
        if (
            name.isdigit()
        ):  # others: the directory itself, and what a file system makes of a file that is removed
            found.append(int(name))
    return found


def _version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
