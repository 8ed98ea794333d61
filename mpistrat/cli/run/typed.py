"""The way of standard input to rank 0."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import shutil
import stat
import tempfile
from pathlib import Path

# Each rank runs this shell command instead of the program: rank 0 with standard input, other ranks without.
_WITH_INPUT = (
    'if [ "${OMPI_COMM_WORLD_RANK-$PMI_RANK}" = 0 ]; then exec "$@" <"$0"; else exec "$@" </dev/null; fi'
)


class Input:
    """The copy of standard input to a named pipe that rank 0 reads.

    Launchers forward input badly. That of Open MPI 5 never ends the input of rank 0, and repeats parts of a long one.
    That of MPICH ends the job if rank 0 reads more slowly than the launcher. A launcher in the background cannot read
    from its terminal. So rank 0 opens a pipe of this process, or the null device without input.

    Attributes
    ----------
    waits : bool
        Whether rank 0 may be waiting for this process to open the pipe.
    """

    def __init__(self) -> None:
        kind = _kind()
        self._terminal = kind == "terminal"
        self._directory: str | None = None
        self._pipe: int | None = None
        self._pending = b""
        self.waits = kind != "nothing"
        if self.waits:
            self._directory = tempfile.mkdtemp(prefix="mpistrat-")
            os.mkfifo(self._fifo, 0o600)

    @property
    def _fifo(self) -> Path:
        return Path(self._directory or "") / "stdin"

    def around(self, program: list[str]) -> list[str]:
        """Return the command that the ranks run instead of this program."""
        source = os.devnull if self._directory is None else str(self._fifo)
        return ["/bin/sh", "-c", _WITH_INPUT, source, *program]

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register with a selector the descriptor of the next read or write, if there is one."""
        if self.waits:
            self._open()
        wanted = None
        if self._pipe is not None and self._in_foreground():
            wanted = self._pipe if self._pending else 0
        for descriptor, event in ((0, selectors.EVENT_READ), (self._pipe, selectors.EVENT_WRITE)):
            if descriptor is None:
                continue
            watched = descriptor in selector.get_map()
            if descriptor == wanted and not watched:
                selector.register(descriptor, event)
            elif descriptor != wanted and watched:
                selector.unregister(descriptor)

    def is_mine(self, descriptor: int) -> bool:
        """Return whether a descriptor that is ready is for `step`."""
        return descriptor in (0, self._pipe)

    def step(self, selector: selectors.BaseSelector) -> None:
        """Read or write once, when the selector reports a descriptor as ready."""
        assert self._pipe is not None
        try:
            if not self._pending:
                self._pending = os.read(0, select.PIPE_BUF)
                if not self._pending:
                    self._end(selector)
                    return
            self._pending = self._pending[os.write(self._pipe, self._pending) :]
        except BlockingIOError:
            return
        except OSError:  # rank 0 has closed its end; or the terminal is gone
            self._end(selector)

    def close(self) -> None:
        """Close and remove the pipe, after the end of the job."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _open(self) -> None:
        """Open the pipe if rank 0 has opened it."""
        try:
            self._pipe = os.open(self._fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self.waits = False
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise

    def _end(self, selector: selectors.BaseSelector) -> None:
        for descriptor in (0, self._pipe):
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(descriptor)  # type: ignore[arg-type]
        if self._pipe is not None:
            os.close(self._pipe)
        self._pipe = None

    def _in_foreground(self) -> bool:
        if not self._terminal:
            return True
        try:
            return os.tcgetpgrp(0) == os.getpgrp()
        except OSError:
            return False


def _kind() -> str:
    """Return the kind of standard input: ``"nothing"``, ``"terminal"`` or ``"data"``."""
    try:
        found = os.fstat(0)
    except OSError:
        return "nothing"
    if stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev:
        return "nothing"
    return "terminal" if os.isatty(0) else "data"
