"""The standard streams of ranks, past a launcher that forwards them badly."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

from mpistrat.cli.run.tagged_lines import TO_PIPES, TaggedLines

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
