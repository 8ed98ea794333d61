"""The banners that launchers print when a job fails, and a launcher's stream, passed on without them.

Only text that may still become a banner is held back. Other text passes at once: a progress bar that ends in ``\\r``
must not wait for its newline.
"""

from __future__ import annotations

import os
import re
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import IO, NamedTuple

from mpistrat.runtime.atomic_file import write_all

_LONGEST = 4096
_DASHES = b"-" * 74 + b"\n"
_EQUALS = b"=" * 83 + b"\n"
_INVOKED = b"MPI_ABORT was invoked on rank "
_ABORTS = _INVOKED, b'"abort"', b"application called MPI_Abort("
_PATIENCE = 0.5  # seconds for which a text may be held back
_BLOCK = 1 << 16


class Death(NamedTuple):
    """A rank that was killed by a signal.

    ``signal`` is the one that the launcher reports, and ``or_signals`` are others that its report may stand for.
    ``rank`` and ``pid`` stay None if the launcher does not report them.
    """

    signal: int
    rank: int | None = None
    pid: int | None = None
    or_signals: tuple[int, ...] = ()


@dataclass(frozen=True)
class Banner:
    """A text that a launcher prints.

    Attributes
    ----------
    first : bytes
        The start of the text.
    second : tuple of bytes
        One of these follows the start.
    last : bytes
        The end of the text.
    whole : re.Pattern
        A pattern of the whole text. The groups ``signal``, ``rank``, ``pid`` and ``code`` describe a death, and
        ``left`` and ``exited`` are ranks that have ended before the end of MPI, or with another exit status than 0.
    fails : bool
        Whether the banner means that the job has failed.
    starts_line : bool
        Whether the banner can only begin at the start of a line.
    """

    first: bytes
    second: tuple[bytes, ...]
    last: bytes
    whole: re.Pattern[bytes] = re.compile(rb".*", re.DOTALL)
    fails: bool = True
    starts_line: bool = False

    def opens(self, data: bytes) -> bool:
        """Return whether ``data`` starts with the first two parts of the banner, so that other text is unlikely."""
        return any(data.startswith(self.first + text) for text in self.second)

    def length(self, data: bytes) -> int | None:
        """Return the length of the banner that ``data`` starts with: 0 without a banner, None if more data decides."""
        if len(data) < len(self.first):
            return None if self.first.startswith(data) else 0
        if not data.startswith(self.first):
            return 0
        rest = data[len(self.first) : len(self.first) + _LONGEST]
        second = next((text for text in self.second if rest.startswith(text)), None)
        if second is None:
            return None if any(text.startswith(rest) for text in self.second) else 0
        end = rest.find(self.last, len(second))
        if end < 0:
            return None if len(rest) < _LONGEST else 0
        length = len(self.first) + end + len(self.last)
        return length if self.whole.fullmatch(data[:length]) else 0


def _open_mpi(host: bytes) -> tuple[Banner, ...]:
    launchers = (b"prterun ", b"mpirun ", b"mpiexec ", b"orterun ")
    events = (
        b"has exited due to process rank ",
        b"detected that one or more processes exited with non-zero status",
        b"noticed that process rank ",
    )
    block = Banner(
        _DASHES,
        (
            _INVOKED,
            b"Primary job  terminated normally, but ",
            *(launcher + event for launcher in launchers for event in events),
        ),
        b"\n" + _DASHES,
        re.compile(
            rb".* noticed that process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node \S+ exited\s+on\s+"
            rb"signal (?P<signal>\d+).*"
            rb"|.* has exited due to process rank (?P<left>\d+) with PID \d+ on node \S+ exiting\s+improperly.*"
            rb"|.* exited with non-zero status.* Process name: \[[^\n]*,(?P<exited>\d+)\].*|.*",
            re.DOTALL,
        ),
    )
    lost = Banner(  # printed by the launcher's server when a rank was killed
        b"[" + host,
        (b".", b":"),
        b"\n",
        re.compile(rb"[^\n]* PMIX ERROR: PMIX_ERR_(UNREACH|LOST_CONNECTION)[^\n]* at line \d+\n"),
        fails=False,
    )
    return block, lost


_TERMINATION = Banner(
    _EQUALS,
    (b"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n",),
    b"Please see the FAQ page for debugging suggestions\n",
    re.compile(
        rb".*=   PID (?P<pid>\d+) RUNNING AT .*=   EXIT CODE: (?P<code>\d+)\n"
        rb".*EXIT STRING: [^\n]* \(signal (?P<signal>\d+)\)\n.*",
        re.DOTALL,
    ),
)
# With the empty line before it, unless that ends a line of the program.
_MPICH_OUT = (replace(_TERMINATION, first=b"\n" + _EQUALS, starts_line=True), _TERMINATION)

_MPICH_ERR = (
    Banner(
        b"Abort(",
        tuple(b"%d" % digit for digit in range(10)) + (b"-",),
        b"\n",
        re.compile(
            rb"Abort\(-?\d+\) on node \d+ \(rank \d+ in comm \S+\): application called MPI_Abort\([^\n]*\n"
        ),
    ),
    # The same where the process manager prints it.
    Banner(b"application called MPI_Abort(", (b"",), b"\n"),
)


def of_stderr(family: str, host: str) -> tuple[Banner, ...]:
    """Return the banners that the launchers of a family of MPI print on stderr."""
    return _open_mpi(host.partition(".")[0].encode()) if family == "openmpi" else _MPICH_ERR


def of_stdout(family: str) -> tuple[Banner, ...]:
    """Return the banners that the launchers of a family of MPI print on stdout."""
    return () if family == "openmpi" else _MPICH_OUT


class Filter:
    """A filter that removes banners from a stream of bytes.

    Attributes
    ----------
    deaths : list of Death
        The ranks that were killed, according to the banners.
    failed : bool
        Whether a banner said that the job failed.
    left : set of int
        The ranks that have ended their processes before the end of MPI, or with another exit status than 0, according
        to the banners.
    aborted : bool
        Whether a banner said that a rank has called ``MPI_Abort``.
    """

    def __init__(self, banners: tuple[Banner, ...]):
        self.deaths: list[Death] = []
        self.left: set[int] = set()
        self.failed = self.aborted = False
        self._banners = banners
        self._held = b""
        self._line_starts = True
        self._after_banner = False
        # Open MPI 5 prints a NUL after the banner of MPI_Abort, in a message of its own: text of ranks may be between.
        self._nul_follows = False

    @property
    def holds(self) -> bool:
        """Whether some text is held back until more data arrives."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Add bytes of the stream, and return the bytes that may pass."""
        self._held += data
        passed = []
        while self._held:
            if self._after_banner and self._held.startswith(b"\0"):
                self._held, self._nul_follows = self._held[1:], False
                continue
            start, banner = self._candidate()
            passed.append(self._pass(start))
            if banner is None:
                break
            length = banner.length(self._held)
            if length is None:
                break
            self._drop(banner, length)
        return b"".join(passed)

    def flush(self) -> bytes:
        """Return the text that is held back, unless it already looks like a banner."""
        return b"" if self._opened() else self._pass(len(self._held))

    def close(self) -> bytes:
        """Return the text that may pass at the end of the stream. A launcher that fails leaves half a banner."""
        banner = self._opened()
        if banner is not None:
            self.failed = self.failed or banner.fails
            self.aborted = self.aborted or _tells_of_abort(self._held)
            self._held = b""
        return self._pass(len(self._held))

    def _opened(self) -> Banner | None:
        return next((banner for banner in self._banners if banner.opens(self._held)), None)

    def _candidate(self) -> tuple[int, Banner | None]:
        """Return the start of the first text that is a banner or may become one, and the banner."""
        best, found = len(self._held), None
        for banner in self._banners:
            start = self._find(banner, best)
            if start < best:
                best, found = start, banner
        return best, found

    def _find(self, banner: Banner, end: int) -> int:
        """Return the first place before ``end`` where this banner starts or may start, else ``end``."""
        data, first = self._held, banner.first
        start = data.find(first)
        while 0 <= start < end:
            if self._may_start(banner, start) and banner.length(data[start:]) != 0:
                return start
            start = data.find(first, start + 1)
        for count in range(min(len(first) - 1, len(data)), 0, -1):
            start = len(data) - count
            if start < end and data.endswith(first[:count]) and self._may_start(banner, start):
                return start
        return end

    def _may_start(self, banner: Banner, start: int) -> bool:
        if not banner.starts_line:
            return True
        return self._held[start - 1 : start] == b"\n" if start else self._line_starts

    def _pass(self, count: int) -> bytes:
        passed, self._held = self._held[:count], self._held[count:]
        if self._nul_follows and b"\0" in passed:
            passed, self._nul_follows = passed.replace(b"\0", b"", 1), False
        if passed:
            self._line_starts = passed.endswith(b"\n")
            self._after_banner = False
        return passed

    def _drop(self, banner: Banner, length: int) -> None:
        dropped, self._held = self._held[:length], self._held[length:]
        self._after_banner = True
        self._nul_follows = self._nul_follows or _INVOKED in dropped
        self.failed = self.failed or banner.fails
        self.aborted = self.aborted or _tells_of_abort(dropped)
        match = banner.whole.fullmatch(dropped)
        groups = match.groupdict() if match is not None else {}
        numbers = {name: int(text) for name, text in groups.items() if text}
        self.left |= {numbers[name] for name in ("left", "exited") if name in numbers}
        if "signal" in numbers:
            self.deaths.append(_death(numbers))


def _tells_of_abort(text: bytes) -> bool:
    return any(each in text for each in _ABORTS)


def _death(numbers: dict[str, int]) -> Death:
    number, code = numbers["signal"], numbers.get("code")
    if code is None:
        return Death(number, numbers.get("rank"), numbers.get("pid"))
    if code != signal.SIGKILL:
        return Death(code, pid=numbers["pid"])
    # MPICH reports one process, perhaps one that MPICH killed itself afterwards. The signal that it reports is the
    # bitwise or of the signals of all processes.
    others = (each for each in range(1, 32) if each != number and each | signal.SIGKILL == number)
    return Death(number, or_signals=tuple(others))


class Forwarded:
    """A thread that copies what a launcher prints to a descriptor of this process.

    Parameters
    ----------
    pipe : binary file
        The output or the errors of the launcher.
    target : int
        The descriptor to write to.
    banners : tuple of Banner
        The texts to leave out.
    at_write_error : callable
        Called if ``target`` cannot be written to: its reader has ended, or the disk is full.

    Attributes
    ----------
    found : Filter
        The deaths and failures that banners told.
    line_ended : bool
        Whether the last byte that was written ends a line.
    write_error : OSError or None
        Why ``target`` could not be written to.
    """

    def __init__(
        self, pipe: IO[bytes], target: int, banners: tuple[Banner, ...], at_write_error: Callable[[], object]
    ):
        self.found = Filter(banners)
        self.line_ended = True
        self.write_error: OSError | None = None
        self._pipe, self._target, self._at_write_error = pipe, target, at_write_error
        self._blocks = 0  # that were read
        self._waits = False  # for the launcher, rather than for the reader of ``target``
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the end of the stream, or until it was silent for so long: other processes may keep it open.

        A slow reader of ``target`` gets the time that it needs.
        """
        while self._thread.is_alive():
            blocks = self._blocks
            self._thread.join(seconds)
            if self._waits and self._blocks == blocks:
                return
        self._pipe.close()

    def _copy(self) -> None:
        while True:
            self._waits = True
            ready = select.select([self._pipe], [], [], _PATIENCE if self.found.holds else None)[0]
            self._waits = False
            data = os.read(self._pipe.fileno(), _BLOCK) if ready else b""
            if ready and not data:
                break
            self._blocks += 1
            self._write(self.found.feed(data) if data else self.found.flush())
        self._write(self.found.close())

    def _write(self, data: bytes) -> None:
        if data:
            self.line_ended = data.endswith(b"\n")
        if self.write_error is None:
            try:
                write_all(self._target, data)
            except OSError as error:  # what follows is read all the same, so that the launcher can end
                self.write_error = error
                self._at_write_error()
