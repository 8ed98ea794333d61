"""The lines of ranks with the number of the rank before each."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable
from pathlib import Path

from mpistrat.runtime.atomic_file import write_all

_BLOCK = 1 << 16
_MOST_BLOCKS = 16  # that a pipe holds
_LONGEST = 1 << 20  # bytes of a line: what follows begins another one
# The command of each rank: $1 and $2 are the names of the pipes for its output and its errors, without its number.
TO_PIPES = 'exec >"$1.${OMPI_COMM_WORLD_RANK-$PMI_RANK}" 2>"$2.${OMPI_COMM_WORLD_RANK-$PMI_RANK}"; shift 2; '


class TaggedLines:
    """A thread that copies whole lines of ranks from named pipes to the output and the errors of this process.

    Each rank has pipes of its own, so that lines of ranks never mix, whatever the pieces are in which they are written.
    The pipes are open for writing here too: processes that ranks leave behind are not waited for.

    Parameters
    ----------
    folder : path
        A directory for the pipes.
    ranks : int

    Attributes
    ----------
    names : list of str
        The names of the pipes for output and errors, without ``.`` and the number of the rank.
    """

    def __init__(self, folder: Path, ranks: int):
        self.names = [str(folder / "output"), str(folder / "errors")]
        self._pipes = selectors.DefaultSelector()
        self._held: dict[int, bytes] = {}  # the begun line of each pipe
        for target, name in enumerate(self.names, 1):
            for rank in range(ranks):
                os.mkfifo(f"{name}.{rank}", 0o600)
                pipe = os.open(f"{name}.{rank}", os.O_RDWR | os.O_NONBLOCK)
                self._pipes.register(pipe, selectors.EVENT_READ, (target, b"[%d] " % rank))
                self._held[pipe] = b""
        self._end, self._ended = os.pipe()
        self._pipes.register(self._end, selectors.EVENT_READ)
        self._broken: dict[int, OSError] = {}

    def start(self, at_write_error: Callable[[], object]) -> None:
        """Start to copy. Call the function if output cannot be written: its reader has ended, or the disk is full."""
        self._at_write_error = at_write_error
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Copy what ranks that have ended left in the pipes, and lines without an end."""
        os.close(self._ended)
        self._thread.join()

    def _copy(self) -> None:
        ready = self._pipes.select()
        while all(key.data for key, _ in ready):
            for key, _ in ready:
                self._take(key.fd, *key.data)
            ready = self._pipes.select()
        self._pipes.unregister(self._end)
        os.close(self._end)
        for key in list(self._pipes.get_map().values()):
            blocks = 0  # a process that a rank left behind may write for ever
            while blocks < _MOST_BLOCKS and self._take(key.fd, *key.data):
                blocks += 1
            if self._held[key.fd]:
                target, tag = key.data
                self._write(target, tag, [self._held[key.fd]])
            os.close(key.fd)
        self._pipes.close()

    def _take(self, pipe: int, target: int, tag: bytes) -> bool:
        """Copy what a pipe has, up to a block. Return whether it had something."""
        try:
            data = os.read(pipe, _BLOCK)
        except BlockingIOError:
            return False
        *lines, rest = (self._held[pipe] + data).split(b"\n")
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        self._held[pipe] = rest
        self._write(target, tag, lines)
        return True

    def _write(self, target: int, tag: bytes, lines: list[bytes]) -> None:
        data = b"".join(b"%s%s\n" % (tag, line) for line in lines)
        if target in self._broken:
            return
        try:
            write_all(target, data)
        except OSError as error:
            self._broken[target] = error  # what follows is read all the same, so that the ranks can end
            self._at_write_error()

    @property
    def write_errors(self) -> list[OSError]:
        """Why output or errors of this process could not be written."""
        return list(self._broken.values())
