"""The standard streams of ranks, past a launcher that forwards them badly, and lines with the number of the rank."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from mpistrat.runtime.atomic_file import write_all

_BLOCK = 1 << 16
_MOST_BLOCKS = 16  # that a pipe holds
_LONGEST = 1 << 20  # bytes of a line: what follows begins another one
# The command of each rank: $1 and $2 are the names of the pipes for its output and its errors, without its number.
TO_PIPES = 'exec >"$1.${OMPI_COMM_WORLD_RANK-$PMI_RANK}" 2>"$2.${OMPI_COMM_WORLD_RANK-$PMI_RANK}"; shift 2; '
RANK = "%(rank)d"  # in the name of a file for the output of each rank
# The command of each rank: $0 is the input of rank 0. $1 and $2 are the descriptors of its output, or the parts of the
# name of its file before and after the number of the rank.
_TO_DESCRIPTORS = 'exec >&"$1" 2>&"$2"; shift 2; '
_TO_FILE = 'exec >"$1${OMPI_COMM_WORLD_RANK-$PMI_RANK}$2" 2>&1; shift 2; '
# Open MPI gives ranks a pseudo-terminal. A pipe in front of it tells the program that its output is not a terminal.
# The copying process has another parent and no variables of a rank, so that nothing takes it for one.
_TO_PIPE = (
    'p="$1.$OMPI_COMM_WORLD_RANK"; '
    '(trap "" HUP INT QUIT TERM; unset OMPI_COMM_WORLD_RANK PMI_RANK; "$2" <"$p" 2>/dev/null &); '
    'exec >"$p"; shift 2; unset p; '
)
_RANK = 'if [ "${OMPI_COMM_WORLD_RANK-$PMI_RANK}" != 0 ]; then exec "$@" </dev/null; fi; exec "$@" <"$0"'


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


class Streams:
    """The standard streams of the ranks of one job.

    Input: the launcher of Open MPI 5 never ends the input of rank 0, and repeats parts of a long one. That of MPICH
    ends the job if rank 0 reads more slowly than the launcher. So rank 0 reads from a named pipe, into which a thread
    of this process copies. Without input, or in the background of a terminal, it reads the null device.

    Output: the launcher of MPICH waits until every process has closed the output of a rank. Its ranks therefore write
    to the output of this process. Other launchers forward output: that of Open MPI keeps lines together.

    Parameters
    ----------
    folder : path
        A directory for the named pipe.
    forwarded : bool
        Whether the launcher forwards output.
    terminals : int
        The number of ranks to which the launcher gives a terminal, even if this process has none.
    output : str, optional
        The name of a file for each rank, with `RANK` in the place of its number. Its output goes there.
    tagged : TaggedLines, optional
        Takes the output of ranks.

    Attributes
    ----------
    inherited : tuple of int
        The descriptors that the launcher must hand on to the ranks.
    """

    def __init__(
        self,
        folder: Path,
        *,
        forwarded: bool,
        terminals: int = 0,
        output: str | None = None,
        tagged: TaggedLines | None = None,
    ):
        self._copier = (
            shutil.which("cat", path=os.defpath)
            if terminals and output is None and tagged is None and not os.isatty(1)
            else None
        )
        self._pipes = folder / "stdout"
        for rank in range(terminals if self._copier else 0):
            os.mkfifo(f"{self._pipes}.{rank}", 0o600)
        self._output, self._tagged = output, tagged
        self._pipe = folder / "stdin" if _has_input() else None
        if self._pipe is not None:
            os.mkfifo(self._pipe, 0o600)
        self.inherited = () if forwarded or output or tagged else (os.dup(1), os.dup(2))
        if max(self.inherited, default=0) > 9:  # a shell knows descriptors of one digit only
            self.inherited = ()

    def around(self, program: Sequence[str]) -> list[str]:
        """Return the command that the ranks run instead of this program."""
        if self._output is not None:
            first, parts = _TO_FILE, self._output.split(RANK, 1)
        elif self._tagged is not None:
            first, parts = TO_PIPES, self._tagged.names
        elif self._copier is not None:
            first, parts = _TO_PIPE, [str(self._pipes), self._copier]
        else:
            first, parts = _TO_DESCRIPTORS, [str(each) for each in self.inherited or (1, 2)]
        return ["/bin/sh", "-c", first + _RANK, str(self._pipe or os.devnull), *parts, *program]

    def copy(self) -> None:
        """Start to copy the input of this process to rank 0."""
        if self._pipe is not None:
            signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # in the background the input ends
            threading.Thread(target=self._copy, daemon=True).start()

    def _copy(self) -> None:
        assert self._pipe is not None
        # Opening waits for rank 0. The errors: rank 0 has closed its end, or the terminal is gone.
        with contextlib.suppress(OSError), open(self._pipe, "wb", buffering=0) as pipe:
            while True:
                select.select([0], [], [])
                data = os.read(0, select.PIPE_BUF)
                if not data:
                    return
                pipe.write(data)


def _has_input() -> bool:
    """Return whether standard input can be read: it is not the null device, nor the terminal of another job."""
    try:
        found = os.fstat(0)
        if os.isatty(0):
            return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
    return not (stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev)
