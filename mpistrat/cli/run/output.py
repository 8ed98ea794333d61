"""The output of ranks on its way past a launcher."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_WITH_OUTPUT = 'exec >"$0" 2>"$1"; shift; exec "$@"'


class Output:
    """Two named pipes, for the standard output and the standard error of all ranks.

    The launchers of MPICH and Intel MPI do not end before every process has closed what it inherited from a rank, and
    do not tell before how the ranks ended. These see nothing of the output. The one of Open MPI gives ranks a
    terminal, and keeps lines together: it is left to that.

    Attributes
    ----------
    descriptors : tuple of int
        Where to read standard output and standard error.
    paths : tuple of str
        The names of these pipes.
    """

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="mpistrat-")
        self.paths = tuple(str(Path(self._directory) / name) for name in ("stdout", "stderr"))
        for path in self.paths:
            os.mkfifo(path, 0o600)
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self.descriptors = tuple(os.open(path, os.O_RDONLY | flags) for path in self.paths)
        # Without a writer of this process the pipe would end between one rank and the next.
        self._writers = [os.open(path, os.O_WRONLY | flags) for path in self.paths]

    def around(self, program: list[str]) -> list[str]:
        """What the ranks have to run instead of this program."""
        return ["/bin/sh", "-c", _WITH_OUTPUT, *self.paths, *program]

    def end(self) -> None:
        """All ranks have ended: the pipes end as soon as no other process has them open."""
        while self._writers:
            os.close(self._writers.pop())

    def close(self) -> None:
        """The job has ended."""
        self.end()
        for descriptor in self.descriptors:
            os.close(descriptor)
        shutil.rmtree(self._directory, ignore_errors=True)
