"""The order in which the ranks of a job end, as the system keeps it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from pathlib import Path

_CLOSED = 0x8  # IN_CLOSE_WRITE
_EVENT = struct.Struct("iIII")  # then a name of as many bytes as the last number says


class EndOrder:
    """The order in which the ranks of a job end.

    MPICH kills all ranks a few milliseconds after the first one, and does not report which one that was. Each rank
    keeps a file of its own open (`mpistrat.runtime.record.end_mark`), and Linux queues a notice when it is closed. So
    one look at the end of the job is enough, also on a busy machine. When processes have ended for good says less: on
    a busy machine the first one may still be ending when the launcher has killed others. Elsewhere than on Linux the
    order is empty, and so it is where no notices are to be had.

    Parameters
    ----------
    folder : pathlib.Path
        The directory of these files: exists, and holds nothing else.
    """

    def __init__(self, folder: Path):
        self._notices: int | None = None
        if sys.platform == "linux":
            system = ctypes.CDLL(None)
            notices = system.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if notices >= 0:  # else this user has too many
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
        if name:  # else the directory itself is meant: it is removed
            found.append(int(name))
    return found
