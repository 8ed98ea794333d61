"""What a launcher prints when a job fails, and its messages, passed on without that.

Ranks do not write to the launcher's streams (see `streams`), so the text here is the launcher's own, but for `OF_RANK`.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import threading
from typing import IO, NamedTuple

from mpistrat.process.atomic_file import write_all

_LONGEST = 4096  # bytes of a banner
_PATIENCE = 0.5  # seconds of silence after which a message is complete
_BLOCK = 1 << 16
_ABORTS = b"MPI_ABORT was invoked on rank ", b'"abort"', b"application called MPI_Abort("
# How a banner begins, and how it goes on.
_OPEN_MPI = (
    rb"-{74}\n(?:MPI_ABORT was invoked on rank |Primary job  terminated normally, but |"
    rb"(?:prterun|mpirun|mpiexec|orterun) (?:has exited due to process rank |noticed that process rank |"
    rb"detected that one or more processes exited with non-zero status))",
    rb".*?\n-{74}\n",
)
_MPICH = (
    rb"\n?={83}\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n",
    rb".*?Please see the FAQ page for debugging suggestions\n",
)
OF_RANK = re.compile(rb"-{74}\nMPI_ABORT was invoked on rank .*?\n-{74}\n\0?", re.DOTALL)
"""What a rank of Open MPI prints itself, in one write, where its connection to the launcher has ended before."""
_ABORT_OF_MPICH = rb"^application called MPI_Abort\([^\n]*\n"
_DEATH = re.compile(
    rb"noticed that process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node \S+ exited\s+on\s+signal (?P<signal>\d+)"
)
_LEFT = re.compile(
    rb"has exited due to process rank (\d+) with PID \d+ on node \S+ exiting\s+improperly"
    rb"|exited with non-zero status.* Process name: \[[^\n]*,(\d+)\]",
    re.DOTALL,
)
_DEATH_OF_MPICH = re.compile(
    rb"=   PID (?P<pid>\d+) RUNNING AT .*=   EXIT CODE: (?P<code>\d+)\n"
    rb".*EXIT STRING: [^\n]* \(signal (?P<signal>\d+)\)\n",
    re.DOTALL,
)


class Death(NamedTuple):
    """A rank that was killed by a signal.

    ``signal`` is the one that the launcher reports, and ``or_signals`` are others that its report may stand for.
    ``rank`` and ``pid`` stay None if the launcher does not report them.
    """

    signal: int
    rank: int | None = None
    pid: int | None = None
    or_signals: tuple[int, ...] = ()


class Banners:
    """The banners in the text of a launcher of an MPI ``family`` on the machine ``host``, and what they tell.

    ``deaths`` are the ranks that were killed. ``left`` are the ranks that have ended their processes before the end of
    MPI, or with another exit status than 0. ``aborted`` says whether a rank has called ``MPI_Abort``.
    """

    def __init__(self, family: str, host: str):
        self.deaths: list[Death] = []
        self.left: set[int] = set()
        self.failed = self.aborted = False
        first, rest = _OPEN_MPI if family == "openmpi" else _MPICH
        self._whole = re.compile(first + rest + b"|" + _ABORT_OF_MPICH, re.DOTALL | re.MULTILINE)
        self._begun = re.compile(first + rb".*", re.DOTALL)
        # The launcher's server prints the first when a rank was killed, the second when it ends a rank that has closed
        # its streams.
        own = re.escape(host.partition(".")[0].encode())
        self._noise = re.compile(
            rb"^\[%s[.:][^\n]* PMIX ERROR: PMIX_ERR_(?:UNREACH|LOST_CONNECTION)[^\n]* at line \d+\n"
            rb"|^\[warn\] Epoll [^\n]*: Bad file descriptor\n" % own,
            re.MULTILINE,
        )

    def cut(self, text: bytes, *, ended: bool = False) -> tuple[bytes, bytes]:
        """Return the text without banners, and the start of one of which more may come.

        Where the text has ``ended``, such a start is a banner: a launcher that fails leaves half of it.
        """
        # Open MPI 5 prints a NUL after the banner of MPI_Abort, in a message of its own.
        text = self._noise.sub(b"", self._whole.sub(self._take, text.replace(b"\0", b"")))
        begun = self._begun.search(text)
        if begun is None or len(begun[0]) > _LONGEST:
            return text, b""
        if ended:
            self._take(begun)
        return text[: begun.start()], b"" if ended else begun[0]

    def _take(self, banner: re.Match[bytes]) -> bytes:
        self.failed = True
        self.aborted = self.aborted or any(each in banner[0] for each in _ABORTS)
        self.left |= {int(match[1] or match[2]) for match in _LEFT.finditer(banner[0])}
        if match := _DEATH.search(banner[0]):
            self.deaths.append(Death(int(match["signal"]), int(match["rank"]), int(match["pid"])))
        elif match := _DEATH_OF_MPICH.search(banner[0]):
            self.deaths.append(_death_of_mpich(int(match["pid"]), int(match["code"]), int(match["signal"])))
        return b""


def _death_of_mpich(pid: int, code: int, number: int) -> Death:
    if code != signal.SIGKILL:
        return Death(code, pid=pid)
    # MPICH reports one process, perhaps one that MPICH killed itself afterwards. The signal that it reports is the
    # bitwise or of the signals of all processes.
    others = (each for each in range(1, 32) if each != number and each | signal.SIGKILL == number)
    return Death(number, or_signals=tuple(others))


class LauncherMessages:
    """A thread that copies what a launcher prints to the errors of this process, but for the banners ``found``."""

    def __init__(self, pipe: IO[bytes], family: str, host: str):
        self.found = Banners(family, host)
        self._pipe = pipe
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the end of the stream, at most so long: other processes may keep it open."""
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._pipe.close()

    def _copy(self) -> None:
        held = b""
        while True:
            ready = select.select([self._pipe], [], [], _PATIENCE if held else None)[0]
            data = os.read(self._pipe.fileno(), _BLOCK) if ready else b""
            held += data
            if not data:
                passed, held = self.found.cut(held, ended=bool(ready))
                with contextlib.suppress(OSError):  # the status of the job is still known
                    write_all(2, passed)
                if ready:
                    return
