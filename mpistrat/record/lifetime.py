"""Functions to call when the record of this process begins, and a file that tells `mpistrat run` when it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from typing import Any

_functions: list[Callable[[Any], object]] = []
VARIABLE = "_MPISTRAT_ENDS"  # the directory of these files
_ABOVE_OTHERS = 256  # above the descriptors that a launcher gives to a rank
_descriptor: int | None = None


def when_started(function: Callable[[Any], object]) -> None:
    """Call a function with the `FlightRecord` of this process when it is made, if there are several ranks."""
    _functions.append(function)


def notify_started(record: Any) -> None:
    """Call the functions of `when_started`, at the first call only."""
    while _functions:
        _functions.pop()(record)


def keep_open() -> None:
    """Keep a file open until this process ends, if it was started by `mpistrat run`.

    Linux closes the files of a process that ends from the highest descriptor down. So this file is closed before the
    sockets and pipes by which a launcher notices the end, and then kills other ranks. Without a high descriptor no
    file is kept. A process that C code forks would keep it open for longer.
    """
    global _descriptor
    folder = os.environ.get(VARIABLE)
    if not folder or _descriptor is not None:
        return
    with contextlib.suppress(OSError):  # another node does not have the directory
        directory = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            high = fcntl.fcntl(directory, fcntl.F_DUPFD_CLOEXEC, _ABOVE_OTHERS)
        finally:
            os.close(directory)
        _descriptor = high
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        low = os.open(os.path.join(folder, str(os.getpid())), flags, 0o600)
        os.dup2(low, high, inheritable=False)
        os.close(low)


def _close() -> None:
    """Close the file in a forked process, which may live longer."""
    global _descriptor
    if _descriptor is not None:
        with contextlib.suppress(OSError):
            os.close(_descriptor)
        _descriptor = None


os.register_at_fork(after_in_child=_close)
