"""The end of a launcher whose `mpistrat run` was killed."""

from __future__ import annotations

import os
import signal
import subprocess

# Without signals of the terminal. The pipe on its input ends with the process that started it.
_COMMAND = (
    'trap "" HUP INT QUIT TERM; read process; while read _; do :; done; kill -s "$0" "$process" 2>/dev/null'
)


class Guard:
    """A process that sends one signal to the launcher when this process dies, however it dies.

    Linux could send the signal (``PR_SET_PDEATHSIG``), but sends it once for each thread of the dead process. At a
    second signal the launcher of Open MPI ends at once, and its ranks go on without it.

    Parameters
    ----------
    number : signal.Signals
        What ends the launcher and its ranks.
    """

    def __init__(self, number: signal.Signals):
        source, self._target = os.pipe()
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _COMMAND, number.name[len("SIG") :]],
            stdin=source,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(source)

    def watch_this_process(self) -> None:
        """Make the calling process the guarded one, with a process group of its own.

        The launcher calls it before its program begins. Signals of the terminal reach it through `mpistrat run` only.
        """
        os.setpgid(0, 0)
        os.write(self._target, b"%d\n" % os.getpid())

    def end(self) -> None:
        """End the guard after the launcher has ended."""
        self._process.kill()
        self._process.wait()
        os.close(self._target)
