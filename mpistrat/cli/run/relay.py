"""A job while it runs: its output, its input, its signals and how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from mpistrat.cli.run import banners, leftovers, processes
from mpistrat.cli.run.banners import Death
from mpistrat.cli.run.job import Job
from mpistrat.cli.run.typed import Input

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_USUAL = (
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGUSR1,
    signal.SIGUSR2,
)  # what programs die of, beside others
_TICK = 0.25  # seconds between looks at what no descriptor tells
_SHORT_TICK = 0.01  # while rank 0 waits for its input to be opened
_PATIENCE = 0.5  # seconds that a text may be held back
_BLOCK = 1 << 16
_SET_PDEATHSIG = 1  # prctl


def run(job: Job, environ: dict[str, str]) -> int:
    """Run a job to its end.

    Standard input goes to rank 0, signals go to the ranks, and their output passes through, without what
    the launcher itself says about a failure.

    Parameters
    ----------
    job : Job
        What to run.
    environ : dict
        The environment, to which the job's own settings are added.

    Returns
    -------
    int
        The exit status: 128 + signal if a rank was killed by one, and never 0 if the job failed.
    """
    return _Relay(job, {**environ, **{name: value for name, value, _ in job.settings}}).run()


class _Relay:
    def __init__(self, job: Job, environ: dict[str, str]):
        self._job = job
        self._started = time.time()
        self._ranks: dict[int, int] = {}
        self._passed_on: set[int] = set()
        self._last = b"\n"
        family = job.launcher.family
        stdout = banners.of_stdout(family)
        self._input = Input()
        self._process = subprocess.Popen(
            [*job.command, *self._input.around(list(job.program))],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if stdout else None,
            stderr=subprocess.PIPE,
            preexec_fn=_as_child(signal.SIGTERM if family == "openmpi" else signal.SIGKILL),
        )
        # Descriptor -> where it goes, and what is taken out on the way.
        self._streams: dict[int, tuple[int, banners.Filter]] = {}
        for pipe, target, unwanted in (
            (self._process.stdout, 1, stdout),
            (self._process.stderr, 2, banners.of_stderr(family, socket.gethostname())),
        ):
            if pipe is not None:
                self._streams[pipe.fileno()] = (target, banners.Filter(unwanted))
        self._filters = [unwanted for _, unwanted in self._streams.values()]

    def run(self) -> int:
        try:
            with _handlers(self._pass_on, self._stop):
                self._relay()
                code = self._process.wait()
        finally:
            self._input.close()
        if code < 0:
            self._end_orphans()
        status = self._status(code)
        if status:
            leftovers.remove(self._started)
        return status

    def _relay(self) -> None:
        started = time.monotonic()
        next_look, step = started, 0.02
        heard = dict.fromkeys(self._streams, started)
        with selectors.SelectSelector() as selector:
            for descriptor in self._streams:
                selector.register(descriptor, selectors.EVENT_READ)
            while self._streams:
                ended = self._process.poll() is not None
                self._input.watch(selector)
                ready = [key.fd for key, _ in selector.select(0 if ended else self._wait(next_look))]
                now = time.monotonic()
                for descriptor in ready:
                    if self._input.is_mine(descriptor):
                        self._input.step(selector)
                        continue
                    heard[descriptor] = now
                    if not self._read(descriptor):
                        selector.unregister(descriptor)
                if ended and not any(descriptor in self._streams for descriptor in ready):
                    break  # somebody else keeps the pipes open
                for descriptor, (target, unwanted) in self._streams.items():
                    if unwanted.holds and now - heard[descriptor] > _PATIENCE:
                        self._write(target, unwanted.flush())
                if self._starting and now >= next_look:
                    self._look()
                    step = min(2 * step, 5.0)
                    next_look = time.monotonic() + step
        for target, unwanted in self._streams.values():
            self._write(target, unwanted.close())

    def _wait(self, next_look: float) -> float:
        """How long nothing but news from the job has to be looked at."""
        if self._input.waits:
            return _SHORT_TICK
        return min(_TICK, max(0.0, next_look - time.monotonic())) if self._starting else _TICK

    @property
    def _starting(self) -> bool:
        return len(self._ranks) < self._job.ranks

    def _look(self) -> dict[int, int]:
        """The ranks that run. Who was which is kept: some launchers name only the process when one dies."""
        ranks = processes.ranks_below(self._process.pid)
        self._ranks.update(ranks)
        return ranks

    def _read(self, descriptor: int) -> bool:
        """Pass on what came; False at its end."""
        target, unwanted = self._streams[descriptor]
        data = os.read(descriptor, _BLOCK)
        self._write(target, unwanted.feed(data) if data else unwanted.close())
        if not data:
            del self._streams[descriptor]
        return bool(data)

    def _write(self, target: int, data: bytes) -> None:
        if target == 2 and data:
            self._last = data[-1:]
        try:
            while data:
                data = data[os.write(target, data) :]
        except BlockingIOError:
            select.select([], [target], [])
            self._write(target, data)
        except BrokenPipeError:
            # Nobody reads this any more: the job learns it as it would without us.
            self._process.send_signal(signal.SIGTERM)

    def _pass_on(self, number: int, frame: Any) -> None:
        """Send a signal to the ranks. Launchers differ: some pass it on, some end the job, some die of it."""
        again = number == signal.SIGINT and number in self._passed_on
        self._passed_on.update((number, signal.SIGKILL) if again else (number,))
        ranks = self._look()
        if self._starting and number in _ENDING:
            self._process.send_signal(signal.SIGKILL if again else signal.SIGTERM)
        for rank in ranks:
            _kill(rank, signal.SIGKILL if again else number)

    def _stop(self, number: int, frame: Any) -> None:
        """The terminal's ^Z: stop with all ranks, and go on with them."""
        ranks = self._look()
        for rank in ranks:
            _kill(rank, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in ranks:
            _kill(rank, signal.SIGCONT)

    def _end_orphans(self) -> None:
        """The launcher was killed, and with it everything that would have ended the ranks."""
        for process, rank in self._ranks.items():
            if processes.rank_of(process) == rank:
                _kill(process, signal.SIGKILL)

    def _status(self, code: int) -> int:
        deaths = [death for unwanted in self._filters for death in unwanted.deaths]
        if deaths:
            death = deaths[0]
            for number in (death.signal, *death.or_signals):
                if number in self._passed_on:
                    return 128 + number
            others = [number for number in death.or_signals if number in _USUAL]
            numbers = " or ".join(map(_signal, (death.signal, *others)))
            self._say(f"{self._name(death)} was killed by signal {numbers}")
            return 128 + death.signal
        if code < 0:
            if -code not in self._passed_on:
                self._say(f"{self._job.launcher.path} was killed by signal {_signal(-code)}")
            return 128 - code
        return code or int(any(unwanted.failed for unwanted in self._filters))

    def _name(self, death: Death) -> str:
        rank = death.rank if death.rank is not None else self._ranks.get(death.pid or 0)
        return "a rank" if rank is None else f"rank {rank}"

    def _say(self, text: str) -> None:
        start = b"" if self._last == b"\n" else b"\n"
        self._write(2, start + f"mpistrat run: {text}\n".encode())


def _signal(number: int) -> str:
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)


def _kill(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _as_child(when_orphaned: int) -> Callable[[], None]:
    """What the launcher does before it becomes the launcher.

    Signals of the terminal must reach it through this process only, so it gets a process group of its own;
    and where that can be asked for, it dies with this process.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    parent = os.getpid()

    def prepare() -> None:
        os.setpgid(0, 0)
        if prctl is not None:
            prctl(_SET_PDEATHSIG, when_orphaned, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

    return prepare


@contextlib.contextmanager
def _handlers(pass_on: Callable[[int, Any], None], stop: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle the signals that are for the ranks. One that this process was told to ignore stays ignored."""
    before = {}
    for number in (*_PASSED_ON, signal.SIGTSTP):
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, stop if number == signal.SIGTSTP else pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
