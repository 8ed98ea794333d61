"""The standard streams of ranks, past a launcher that forwards them badly, and the messages of that launcher.

Launchers forward output each in its own way: one mixes lines of ranks, one waits for processes that ranks leave behind,
one ends with 0 where it cannot write. So no launcher sees the output. Each rank has channels of its own, which a thread
of `mpistrat run` copies. What a launcher prints is its own, but for `OF_RANK`, and is passed on without the banners
that it prints when a job fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import selectors
import signal
import stat
import termios
import threading
import tty
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from mpistrat.process import standby
from mpistrat.process.files import write_all

_LONGEST_BANNER = 4096  # bytes of a banner
_SILENCE_S = 0.5  # seconds of silence after which a message is complete
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
"""The banner that a rank of Open MPI prints itself, in one write, if its connection to the launcher ended before."""
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
_MOST_BLOCKS = 16  # that a pipe holds
_LONGEST = 1 << 20  # bytes of a line: what follows begins another one
RANK = "%(rank)d"  # in the name of a file for the output of each rank
# The command of each rank: $0 is the input of rank 0. $1 and $2 are the names of its channels without its number, or
# the parts of the name of its file before and after the number.
_TO_CHANNELS = 'exec >"$1.${OMPI_COMM_WORLD_RANK-$PMI_RANK}" 2>"$2.${OMPI_COMM_WORLD_RANK-$PMI_RANK}"; shift 2; '
_TO_FILE = 'exec %s"$1${OMPI_COMM_WORLD_RANK-$PMI_RANK}$2" 2>&1; shift 2; '
_RANK = 'if [ "${OMPI_COMM_WORLD_RANK-$PMI_RANK}" != 0 ]; then exec "$@" </dev/null; fi; exec "$@" <"$0"'


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
    """The banners in the text of a launcher of an MPI ``family`` on the machine ``host``, and their facts.

    ``deaths`` are the ranks that were killed. ``left`` are the ranks that have ended their processes before the end of
    MPI, or with another exit status than 0. ``aborted`` says whether a rank has called ``MPI_Abort``.
    """

    def __init__(self, family: str, host: str):
        self.deaths: list[Death] = []
        self.left: set[int] = set()
        self.failed = self.aborted = False
        first, rest = _OPEN_MPI if family == "openmpi" else _MPICH
        self._banner = re.compile(first + rest + b"|" + _ABORT_OF_MPICH, re.DOTALL | re.MULTILINE)
        self._banner_start = re.compile(first + rb".*", re.DOTALL)
        # The launcher's server prints the first when a rank was killed, the second when it ends a rank that has closed
        # its streams.
        own = re.escape(host.partition(".")[0].encode())
        self._noise = re.compile(
            rb"^\[%s[.:][^\n]* PMIX ERROR: PMIX_ERR_(?:UNREACH|LOST_CONNECTION)[^\n]* at line \d+\n"
            rb"|^\[warn\] Epoll [^\n]*: Bad file descriptor\n" % own,
            re.MULTILINE,
        )

    def cut(self, text: bytes, *, ended: bool = False) -> tuple[bytes, bytes]:
        """Return the text without banners, and the start of a banner that may be incomplete.

        Where the text has ``ended``, such a start is a banner: a launcher that fails leaves half of it.
        """
        # Open MPI 5 prints a NUL after the banner of MPI_Abort, in a message of its own.
        text = self._noise.sub(b"", self._banner.sub(self._take, text.replace(b"\0", b"")))
        begun = self._banner_start.search(text)
        if begun is None or len(begun[0]) > _LONGEST_BANNER:
            return text, b""
        if ended:
            self._take(begun)
        return text[: begun.start()], b"" if ended else begun[0]

    def _take(self, banner: re.Match[bytes]) -> bytes:
        self.failed = True
        self.aborted = self.aborted or any(text in banner[0] for text in _ABORTS)
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
    others = (candidate for candidate in range(1, 32) if candidate != number and candidate | signal.SIGKILL == number)
    return Death(number, or_signals=tuple(others))


class LauncherMessages:
    """A thread that copies the output of a launcher, without its ``banners``, to the errors of this process."""

    def __init__(self, pipe: IO[bytes], family: str, host: str):
        self.banners = Banners(family, host)
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
            ready = select.select([self._pipe], [], [], _SILENCE_S if held else None)[0]
            data = os.read(self._pipe.fileno(), _BLOCK) if ready else b""
            held += data
            if not data:
                passed, held = self.banners.cut(held, ended=bool(ready))
                with contextlib.suppress(OSError):  # the status of the job is still known
                    write_all(2, passed)
                if ready:
                    return


class Streams:
    """The standard streams of the ranks of one job. Their channels are made in ``folder``.

    Input: the launcher of Open MPI 5 never ends the input of rank 0, and repeats parts of a long one. That of MPICH
    ends the job if rank 0 reads more slowly than the launcher. So rank 0 reads from a named pipe, into which a thread
    of this process copies. Without input, or in the background of a terminal, it reads the null device.

    Output: where this process writes to a terminal, each rank has a terminal, and its output passes at once, since a
    progress bar does not end its line. Elsewhere it has a named pipe, and whole lines pass, so that lines of ranks
    never mix. All channels are open for writing here too: processes that ranks leave behind are not waited for.

    If given, ``output`` is the name of a file for each rank, with `RANK` in the place of its number. Its output goes
    there, and ``appends`` says whether the file keeps what it has. ``tag`` says whether each line begins with the
    number of its rank. ``line_ended`` says whether the last byte that was written to the errors of this process ends a
    line.
    """

    def __init__(
        self, folder: Path, ranks: int, *, output: str | None = None, tag: bool = False, appends: bool = False
    ):
        self.line_ended = True
        self._output, self._appends = output, appends
        self._names = [str(folder / "output"), str(folder / "errors")]
        self._channels = selectors.DefaultSelector()
        self._held: dict[int, bytes] = {}  # the begun line of each pipe
        self._terminals: list[int] = []  # the ranks' ends of terminals
        for target, name in enumerate(self._names, 1):
            for rank in range(ranks if output is None else 0):
                if os.isatty(target) and not tag:
                    channel, theirs = _terminal(f"{name}.{rank}", target)
                    self._terminals.append(theirs)
                else:
                    os.mkfifo(f"{name}.{rank}", 0o600)
                    channel = os.open(f"{name}.{rank}", os.O_RDWR | os.O_NONBLOCK)
                    self._held[channel] = b""
                self._channels.register(channel, selectors.EVENT_READ, (target, b"[%d] " % rank if tag else b""))
        self._end, self._ended = os.pipe()
        self._channels.register(self._end, selectors.EVENT_READ)
        self._broken: dict[int, OSError] = {}
        self._pipe = folder / standby.INPUT if _has_input() else None
        if self._pipe is not None:
            os.mkfifo(self._pipe, 0o600)

    def around(self, program: Sequence[str], *, waits: bool = False) -> list[str]:
        """Return the command that the ranks run instead of this program.

        To open the input waits for `start`. So a program that ``waits`` opens it itself.
        """
        if self._output is not None:
            first, parts = _TO_FILE % (">>" if self._appends else ">"), self._output.split(RANK, 1)
        else:
            first, parts = _TO_CHANNELS, self._names
        return [
            "/bin/sh",
            "-c",
            first + _RANK,
            str(os.devnull if waits else self._pipe or os.devnull),
            *parts,
            *program,
        ]

    def start(self, at_write_error: Callable[[], object]) -> None:
        """Start to copy. Call the function if output cannot be written: its reader has ended, or the disk is full."""
        self._at_write_error = at_write_error
        self._thread = threading.Thread(target=self._copy_output, daemon=True)
        self._thread.start()
        if self._pipe is not None:
            signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # in the background the input ends
            threading.Thread(target=self._copy_input, args=(os.dup(self._end),), daemon=True).start()

    def finish(self) -> None:
        """Copy the rest of the channels of ranks that have ended, with lines that lack an end."""
        os.write(self._ended, b"\0")
        self._thread.join()
        self.close()

    def close(self) -> None:
        """Close the channels, without copying what they have. `finish` does it, too."""
        for descriptor in [*(key.fd for key in self._channels.get_map().values()), *self._terminals, self._ended]:
            os.close(descriptor)
        self._channels.close()

    @property
    def write_errors(self) -> list[OSError]:
        """Why output or errors of this process could not be written."""
        return list(self._broken.values())

    def _copy_output(self) -> None:
        ready = self._channels.select()
        while all(key.data for key, _ in ready):
            for key, _ in ready:
                self._take(key.fd, *key.data)
            ready = self._channels.select()
        for key in [key for key in self._channels.get_map().values() if key.data]:
            blocks = 0  # a process that a rank left behind may write for ever
            while blocks < _MOST_BLOCKS and self._take(key.fd, *key.data):
                blocks += 1
            target, tag = key.data
            if rest := self._held.get(key.fd):
                self._write(target, b"%s%s\n" % (tag, rest) if tag else rest)

    def _take(self, channel: int, target: int, tag: bytes) -> bool:
        """Copy up to a block from a channel. Return whether it had any bytes."""
        try:
            data = os.read(channel, _BLOCK)
        except BlockingIOError:
            return False
        if target == 2:
            data = OF_RANK.sub(b"", data)
        if channel in self._held:
            *lines, rest = (self._held[channel] + data).split(b"\n")
            if len(rest) > _LONGEST:
                lines, rest = [*lines, rest], b""
            self._held[channel] = rest
            data = b"".join(b"%s%s\n" % (tag, line) for line in lines)
        self._write(target, data)
        return True

    def _write(self, target: int, data: bytes) -> None:
        if not data or target in self._broken:
            return
        if target == 2:
            self.line_ended = data.endswith(b"\n")
        try:
            write_all(target, data)
        except OSError as error:
            self._broken[target] = error  # what follows is read all the same, so that the ranks can end
            self._at_write_error()

    def _copy_input(self, end: int) -> None:
        assert self._pipe is not None
        # Opening waits for rank 0. The errors: rank 0 has closed its end, or the terminal is gone.
        with open(end, "rb", buffering=0), contextlib.suppress(OSError), open(self._pipe, "wb", buffering=0) as pipe:
            while True:
                if end in select.select([0, end], [], [])[0]:
                    return  # what follows is for the next run of an elastic job
                data = os.read(0, select.PIPE_BUF)
                if not data:
                    return
                pipe.write(data)


def _terminal(name: str, target: int) -> tuple[int, int]:
    """Make a terminal as large as the one of a descriptor, which opens under a name. Return its two ends, ours first.

    Bytes pass unchanged: the terminal of this process interprets them.
    """
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(target, termios.TIOCGWINSZ, bytes(8)))
    os.set_blocking(ours, False)
    os.symlink(os.ttyname(theirs), name)
    return ours, theirs


def _has_input() -> bool:
    """Return whether standard input can be read: it is not the null device, nor the terminal of another job."""
    try:
        status = os.fstat(0)
        if os.isatty(0):
            return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
    return not (stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat(os.devnull).st_rdev)
