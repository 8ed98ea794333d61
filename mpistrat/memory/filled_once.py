"""Memory that the ranks of a node fill together, each piece once, without messages."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from mpistrat.memory.buffer_pool import new_memory
from mpistrat.memory.shared import pages, share_in_pieces


class FilledOnce:
    """Bytes in pieces. The first rank that needs a piece fills it. The other ranks find it filled.

    Ranks exclude each other by a lock of the system for each piece, which it frees if a rank fails, and threads by one
    lock. Pages are reserved when their piece is filled: a lack of memory is an error of `fill`, not a SIGBUS.

    The ranks of ``node`` share the memory, and make the object together; without it, the memory is private. ``part`` is
    where this rank should begin, as a part of the pieces. Raise NoSharedMemoryError on every rank of the node, or
    OSError alone, if memory is short.

    >>> numbers = FilledOnce(8, 2)
    >>> for _ in range(2):
    ...     numbers.fill(1, [(4, 4)], lambda: numbers.memory[4:].__iadd__(1))
    >>> numbers.memory.tolist()
    [0, 0, 0, 0, 1, 1, 1, 1]
    """

    def __init__(self, nbytes: int, pieces: int, node: Any = None):
        self._descriptor: int | None = None
        self._filled: Any = bytearray(pieces)
        self.part = 0.0
        if node is None or node.size == 1:
            memory, start = new_memory(max(1, nbytes))
            self.memory = np.frombuffer(memory, np.uint8, nbytes, start)
            return
        self.part = node.rank / node.size
        self._locks = pages(nbytes)
        self.memory, self._descriptor = share_in_pieces(self, node, nbytes, pieces)
        self._filled = self.memory[self._locks :]

    def fill(self, piece: int, spans: Iterable[tuple[int, int]], load: Callable[[], Any]) -> None:
        """Call ``load`` to fill a piece, the bytes of ``spans`` (start, number), unless a rank of the node has done so.

        Raise OSError if the node has not enough memory.
        """
        with self._locked(piece):
            if not self._filled[piece]:
                if self._descriptor is not None:
                    for start, nbytes in spans:
                        os.posix_fallocate(self._descriptor, start, max(1, nbytes))
                load()
                self._filled[piece] = 1

    @contextlib.contextmanager
    def _locked(self, piece: int) -> Iterator[None]:
        # A lock of the system belongs to the process: its threads would fill a piece twice. One lock for all objects,
        # because the system reports a deadlock if two threads of a process wait for and hold locks of two objects.
        with _filling:
            if self._descriptor is None:
                yield
                return
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, self._locks + piece)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._locks + piece)


_filling = threading.Lock()


def _renew_lock() -> None:
    """Make a new lock in a forked child: a thread of its parent may have held the lock during the fork."""
    global _filling
    _filling = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
