"""The order in which processes end, as the system keeps it."""

from __future__ import annotations

import contextlib
import os
import select
import sys


class EndOrder:
    """The order in which the ranks of a job end.

    MPICH kills all ranks a few milliseconds after the first one, and does not report which one that was. Linux makes a
    descriptor of a process readable when the process ends, and ``epoll`` gives descriptors in the order in which they
    became readable. So one look at the end of the job is enough, also on a busy machine. Elsewhere the order is
    empty.
    """

    def __init__(self) -> None:
        self._processes: dict[int, int] = {}  # by descriptor
        if sys.platform == "linux":
            self._ready = select.epoll()

    def add(self, process: int) -> None:
        """Add a process that runs. A process is added once."""
        if sys.platform != "linux" or process in self._processes.values():
            return
        with contextlib.suppress(OSError):  # it has just ended, or the system is older than Linux 5.3
            descriptor = os.pidfd_open(process)
            self._processes[descriptor] = process
            self._ready.register(descriptor, select.EPOLLIN)

    def close(self) -> list[int]:
        """Return the processes that have ended, the first one first, and forget all processes."""
        ended: list[int] = []
        if sys.platform == "linux":
            if self._processes:
                ready = self._ready.poll(0, len(self._processes))
                ended = [self._processes[descriptor] for descriptor, _ in ready]
            self._ready.close()
        for descriptor in self._processes:
            os.close(descriptor)
        self._processes = {}
        return ended
