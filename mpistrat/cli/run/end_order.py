"""The order in which processes end, as the system keeps it."""

from __future__ import annotations

import os
import resource
import select
import sys

_SPARE = 32  # descriptors that are left to all else that the launch of a job needs


class EndOrder:
    """The order in which the ranks of a job end.

    MPICH kills all ranks a few milliseconds after the first one, and does not report which one that was. Linux makes a
    descriptor of a process readable when the process ends, and ``epoll`` gives descriptors in the order in which they
    became readable. So one look at the end of the job is enough, also on a busy machine. Elsewhere the order is
    empty, and so it is where the descriptors of this process would run short.
    """

    def __init__(self) -> None:
        self._processes: dict[int, int] = {}  # by descriptor
        self._known: set[int] = set()
        self._open = hasattr(os, "pidfd_open")  # builds of Python with old headers of the system lack it
        if sys.platform == "linux":
            self._ready = select.epoll()

    def add(self, process: int) -> None:
        """Add a process that runs. A process is added once. Without a descriptor for it the order is given up."""
        if sys.platform != "linux" or not self._open or process in self._known:
            return
        self._known.add(process)
        try:
            descriptor = os.pidfd_open(process)
            self._processes[descriptor] = process
            self._ready.register(descriptor, select.EPOLLIN)
        except ProcessLookupError:  # it has just ended
            return
        except OSError:  # no descriptor is left, or the system is older than Linux 5.3
            self.close()
            return
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY and descriptor >= limit - _SPARE:  # the lowest free number
            self.close()

    def close(self) -> list[int]:
        """Return the processes that have ended, the first one first. Forget all processes, and take no others."""
        self._open = False
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
