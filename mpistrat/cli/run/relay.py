"""The relay of a running job: its output, input, signals and exit status."""

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
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from mpistrat.cli.run import banners, leftovers, processes
from mpistrat.cli.run.banners import Death
from mpistrat.cli.run.job import Job
from mpistrat.cli.run.output import Output
from mpistrat.cli.run.typed import Input

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_USUAL = (
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGUSR1,
    signal.SIGUSR2,
)  # more likely causes of a death than other signals
_TICK = 0.25  # seconds between checks that do not depend on a descriptor
_SHORT_TICK = 0.01  # while rank 0 waits for its input to be opened
_PATIENCE = 0.5  # seconds for which a text may be held back
_ALL_ENDED = 2.0  # seconds that a launcher may wait for other processes after its ranks, and then to end
_BLOCK = 1 << 16
_SET_PDEATHSIG = 1  # prctl
_SESSIONS = "PRTE_MCA_prte_tmpdir_base"


def run(job: Job, environ: dict[str, str]) -> int:
    """Run a job to its end.

    Standard input goes to rank 0 and signals go to the ranks. The output of the ranks passes through, without the
    messages of the launcher about a failure.

    Parameters
    ----------
    job : Job
        The job to run.
    environ : dict
        The environment, to which the job's own settings are added.

    Returns
    -------
    int
        The exit status: 128 + signal if a rank was killed by one, and never 0 if the job failed.
    """
    environ = {**environ, **{name: value for name, value, _ in job.settings}}
    with _session_directory(environ):
        return _Relay(job, environ).run()


@contextlib.contextmanager
def _session_directory(environ: dict[str, str]) -> Iterator[None]:
    """Give Open MPI 5 a directory of this job for its files, unless the user chose one.

    It names them after the process id of its launcher. A launcher that was killed leaves them behind, and one that
    gets the same process id later refuses to start ("The PMIx server's listener thread failed to start").
    """
    if _SESSIONS in environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mpistrat-", ignore_cleanup_errors=True) as environ[_SESSIONS]:
        yield


class _Relay:
    def __init__(self, job: Job, environ: dict[str, str]):
        self._job = job
        self._started = time.time()
        self._ranks: dict[int, int] = {}
        self._passed_on: set[int] = set()
        self._outputs: dict[str, int] = {}
        self._alone_since: float | None = None
        self._released = False
        self._last = b"\n"
        family = job.launcher.family
        self._input = Input()
        self._output = None if family == "openmpi" else Output()
        program = self._input.around(list(job.program))
        if self._output is not None:
            program = self._output.around(program)
            self._outputs = dict.fromkeys(self._output.paths, 0)
        self._process = subprocess.Popen(
            [*job.command, *program],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=None if self._output is None else subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_as_child(signal.SIGTERM if family == "openmpi" else signal.SIGKILL),
        )
        # Descriptor -> the descriptor to write to, and the filter of the launcher's messages.
        self._streams: dict[int, tuple[int, banners.Filter]] = {}
        stdout, stderr = banners.of_stdout(family), banners.of_stderr(family, socket.gethostname())
        for pipe, target, unwanted in ((self._process.stdout, 1, stdout), (self._process.stderr, 2, stderr)):
            if pipe is not None:
                self._streams[pipe.fileno()] = (target, banners.Filter(unwanted))
        self._of_launcher = set(self._streams)
        if self._output is not None:
            for descriptor, target, unwanted in zip(
                self._output.descriptors, (1, 2), ((), stderr), strict=True
            ):
                self._streams[descriptor] = (target, banners.Filter(unwanted))
        self._filters = [unwanted for _, unwanted in self._streams.values()]

    def run(self) -> int:
        try:
            with _handlers(self._pass_on, self._stop):
                self._relay()
                code = self._process.wait()
        finally:
            self._input.close()
            if self._output is not None:
                self._output.close()
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
                if ended and self._output is not None:
                    self._output.end()
                self._input.watch(selector)
                ready = [key.fd for key, _ in selector.select(self._wait(next_look))]
                now = time.monotonic()
                for descriptor in ready:
                    if self._input.is_mine(descriptor):
                        self._input.step(selector)
                        continue
                    heard[descriptor] = now
                    if not self._read(descriptor):
                        selector.unregister(descriptor)
                drained = ended and self._streams.keys().isdisjoint(ready)
                if drained and (self._released or self._process.returncode):
                    break  # another process keeps the pipes open
                for descriptor, (target, unwanted) in self._streams.items():
                    if unwanted.holds and now - heard[descriptor] > _PATIENCE:
                        self._write(target, unwanted.flush())
                if ended or not self._starting:
                    self._watch_end(now, ended)
                elif now >= next_look:
                    self._look()
                    step = min(2 * step, 5.0)
                    next_look = time.monotonic() + step
        for target, unwanted in self._streams.values():
            self._write(target, unwanted.close())

    def _wait(self, next_look: float) -> float:
        """Return the seconds to wait for output of the job before the next check of its processes."""
        if self._process.returncode:
            return 0
        if self._input.waits or self._of_launcher.isdisjoint(self._streams):
            return _SHORT_TICK
        return min(_TICK, max(0.0, next_look - time.monotonic())) if self._starting else _TICK

    @property
    def _starting(self) -> bool:
        return len(self._ranks) < self._job.ranks

    def _look(self) -> dict[int, int]:
        """Return the running ranks, and record them: some launchers report only the process of a rank that dies."""
        ranks = processes.ranks_below(self._process.pid)
        for process in ranks.keys() - self._ranks.keys():
            self._outputs.update(processes.outputs(process))
        self._ranks.update(ranks)
        return ranks

    def _watch_end(self, now: float, ended: bool) -> None:
        """Limit the wait for processes that ranks left behind and that keep the output of ranks open."""
        ranks = {} if ended else self._ranks
        if any(processes.rank_of(process) == rank for process, rank in ranks.items()):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > _ALL_ENDED:
            self._alone_since = now
            if self._released:
                self._process.kill()
            elif ended or self._holders():
                self._release()

    def _holders(self) -> list[int]:
        """Return the processes that keep the output of ranks open."""
        own = processes.outputs(os.getpid())
        return processes.writers({name: self._outputs[name] for name in self._outputs.keys() - own})

    def _release(self) -> None:
        """End the launcher after its ranks have ended, and report the processes for which it waits."""
        if not self._released:
            self._released = True
            for process in self._holders():
                self._say(
                    f"all ranks have ended, but process {process} ({processes.command_of(process)}), which one of "
                    "them started, keeps its output open: it is not waited for"
                )
        self._process.terminate()

    def _read(self, descriptor: int) -> bool:
        """Pass on the data of a descriptor; return False at its end."""
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
            # The reader of our output has ended: end the job, as without the relay.
            self._process.send_signal(signal.SIGTERM)

    def _pass_on(self, number: int, frame: Any) -> None:
        """Send a signal to the ranks, not the launcher: some launchers pass it on, some end the job, some die."""
        repeated = number in self._passed_on
        again = number == signal.SIGINT and repeated
        ended_before = not self._passed_on.isdisjoint(_ENDING)
        self._passed_on.update((number, signal.SIGKILL) if again else (number,))
        ranks = self._look()
        if number in _ENDING:
            if self._starting:
                self._process.send_signal(signal.SIGKILL if again else signal.SIGTERM)
            elif not ranks:
                self._process.kill() if ended_before else self._release()
            elif repeated and not again:
                running = ", ".join(f"{rank} (process {process})" for process, rank in ranks.items())
                self._say(f"ranks that still run: {running}; SIGINT twice kills them")
        for rank in ranks:
            _kill(rank, signal.SIGKILL if again else number)

    def _stop(self, number: int, frame: Any) -> None:
        """Stop this process and all ranks at ^Z of the terminal, and continue them together."""
        ranks = self._look()
        for rank in ranks:
            _kill(rank, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in ranks:
            _kill(rank, signal.SIGCONT)

    def _end_orphans(self) -> None:
        """Kill the ranks that still run after the launcher was killed."""
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
        if self._released and self._job.launcher.family == "openmpi":
            # This launcher ends at once if a rank fails, so all ranks succeeded. Others return the ranks' status.
            return int(any(unwanted.failed for unwanted in self._filters))
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
    """Return a function that the child process calls before it executes the launcher.

    Signals of the terminal must reach the launcher through this process only, so it gets its own process group. On
    Linux it also gets the signal ``when_orphaned`` when this process dies.
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
    """Handle the signals that are for the ranks. A signal that this process ignores stays ignored."""
    before = {}
    for number in (*_PASSED_ON, signal.SIGTSTP):
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, stop if number == signal.SIGTSTP else pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
