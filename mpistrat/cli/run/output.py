"""The way of the ranks' output past a launcher."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_WITH_OUTPUT = 'exec >"$0" 2>"$1"; shift; exec "$@"'


class Output:
    """Two named pipes, for the standard output and the standard error of all ranks.

    The launchers of MPICH and Intel MPI wait until every process has closed the output that it inherited from a rank.
    Only then do they tell how the ranks ended. With these pipes they do not see the output. The launcher of Open MPI
    forwards output itself: it gives ranks a terminal and keeps lines together.

    Attributes
    ----------
    descriptors : tuple of int
        The descriptors from which to read standard output and standard error.
    paths : tuple of str
        The paths of the two pipes.
    """

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="mpistrat-")
        self.paths = tuple(str(Path(self._directory) / name) for name in ("stdout", "stderr"))
        for path in self.paths:
            os.mkfifo(path, 0o600)
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self.descriptors = tuple(os.open(path, os.O_RDONLY | flags) for path in self.paths)
        # Keep a writer in this process: else the pipe would end when the first rank closes it.
        self._writers = [os.open(path, os.O_WRONLY | flags) for path in self.paths]

    def around(self, program: list[str]) -> list[str]:
        """Return the command that the ranks run instead of this program."""
        return ["/bin/sh", "-c", _WITH_OUTPUT, *self.paths, *program]

    def end(self) -> None:
        """Close the writers of this process, so that the pipes end when no other process has them open."""
        while self._writers:
            os.close(self._writers.pop())

    def close(self) -> None:
        """Close and remove the pipes, after the end of the job."""
        self.end()
        for descriptor in self.descriptors:
            os.close(descriptor)
        shutil.rmtree(self._directory, ignore_errors=True)
