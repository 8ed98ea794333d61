"""One run of an elastic job on several hosts: its end, and the hosts that are left.

What the launcher reports does not tell a loss from an error. Open MPI 5.0 ends with 0 where a daemon was killed, and
with 14 where the other ranks notice a lost one first. So the shell of each rank notes its exit status in the memory of
its host, and the hosts are asked after the run.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpistrat.cli.run.job import Job
from mpistrat.cli.run.running_job import Guard, JobEnd, handlers
from mpistrat.launch.launch import HANG, RESTART
from mpistrat.process.failure import ENDS

_TICK = 0.25  # seconds between looks at the statuses of this host
_ENDING = 5.0  # seconds for the launcher to end after a rank has failed: Open MPI's waits for a silent host for ever
_ANSWER = 60.0  # seconds for a host to answer, on a busy machine
_LATER = 8.0  # seconds that the next may need after another one
_MPI_ERR_UNKNOWN = 14  # of ranks of Open MPI that notice the loss of another one
_FOR_THE_JOB = (128 + signal.SIGINT, 128 + signal.SIGTERM)
# The signals are for the program.
_RANK = """
mkdir -p -m 700 "$1" && [ -O "$1" ] || exit 1
shift; trap : TERM USR1 USR2
"$@"; status=$?
echo "$status" >>"$%s"
exit "$status"
"""
_SAYS = "statuses"  # before what a host answers: a launcher or ssh may print, too


class JobOnHosts:
    """A launcher and its ranks on the hosts of a job.

    ``folder`` is the directory of copies, which each host has in its memory.
    """

    def __init__(self, job: Job, environ: dict[str, str], folder: Path):
        self._job, self._folder, self._ends = job, folder, folder / "ends"
        settings = {name: value for name, value, _ in job.settings}
        self._environ = {**environ, **settings, ENDS: str(self._ends)}
        self._guard = Guard(signal.SIGTERM if job.launcher.family == "openmpi" else signal.SIGKILL)
        rank = ("/bin/sh", "-c", _RANK % ENDS, "rank", str(folder))
        self._process = subprocess.Popen(
            job.on_hosts(job.hosts, [*rank, *job.program], self._environ),
            env=self._environ,
            stdin=subprocess.DEVNULL,
            preexec_fn=self._guard.watch_this_process,
        )
        self._passed_on: set[int] = set()

    def begin(self) -> bool:
        """Return False: these ranks do not wait."""
        return False

    def finish(self, meanwhile: Callable[[], object]) -> JobEnd:
        """Let the job run to its end, and return how it ended. Call a function now and then until it ends."""
        failed_at = None
        with handlers(self._pass_on, self._pass_on):
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_TICK)
                    break
                meanwhile()
                with contextlib.suppress(OSError):
                    if set(_statuses(self._ends.read_text())) - {0, RESTART}:
                        failed_at = failed_at or time.monotonic()
                        if time.monotonic() - failed_at > _ENDING:
                            self._process.kill()  # the daemons end their ranks
        self._guard.end()
        ends = shlex.quote(str(self._ends))
        answers = _ask(self._job, f"cat {ends}; rm -f {ends}")
        left = {host: ranks for host, ranks in self._job.hosts.items() if host in answers}
        status, lost = self._cause([each for of_host in answers.values() for each in of_host], left)
        return JobEnd(status, not lost and bool(self._passed_on), lost, left)

    def close(self) -> None:
        """End the launcher, if it has not ended."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
            self._guard.end()

    def _cause(self, statuses: Sequence[int], left: Container[str]) -> tuple[int, str]:
        """Return the exit status of the job, and what was lost, in words; empty if its end was no loss."""
        own = next((each for each in statuses if each not in (0, _MPI_ERR_UNKNOWN, *_FOR_THE_JOB)), 0)
        if statuses.count(0) == self._job.ranks:
            return 0, ""
        if self._passed_on:
            return own or 128 + min(self._passed_on), ""
        if gone := ", ".join(host for host in self._job.hosts if host not in left):
            return 128 + signal.SIGKILL, gone
        if HANG in statuses:
            return HANG, "a rank"
        if own and not any(map(_is_loss, statuses)):
            return own, ""
        return 128 + signal.SIGKILL, "a rank"

    def _pass_on(self, number: int, frame: Any) -> None:
        """Send a signal to the launcher, which has daemons on the hosts. The second SIGINT or SIGTERM kills it."""
        repeated = number in self._passed_on
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            self._passed_on.add(number)
        self._process.send_signal(signal.SIGKILL if repeated else number)


def remove_copies(job: Job, folder: Path) -> None:
    """Remove the copies in a directory from the hosts of a job."""
    _ask(job, f"rm -rf {shlex.quote(str(folder))}")


def _ask(job: Job, command: str) -> dict[str, list[int]]:
    """Run a command on each host of a job. Return the statuses that it prints, of the hosts that answer."""
    asked = {
        host: subprocess.Popen(
            job.on_hosts({host: 1}, ["/bin/sh", "-c", f"echo {_SAYS} $({command})"], ()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for host in job.hosts
    }
    answers, until = {}, time.monotonic() + _ANSWER
    for host, process in asked.items():
        with process:
            try:
                said = process.communicate(timeout=max(0.0, until - time.monotonic()))[0]
            except subprocess.TimeoutExpired:
                process.kill()
                continue
        if _SAYS in said:
            answers[host] = _statuses(said)
            until = min(until, time.monotonic() + _LATER)
    return answers


def dealt(hosts: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return how many of so many ranks each host gets: its own number if that fits, else about as many as others."""
    if sum(hosts.values()) == ranks:
        return dict(hosts)
    if not hosts:
        return {}
    each, more = divmod(ranks, len(hosts))
    counts = {host: each + (number < more) for number, host in enumerate(hosts)}
    return {host: count for host, count in counts.items() if count}


def _statuses(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdecimal()]


def _is_loss(status: int) -> bool:
    return status == HANG or (status > 128 and status not in _FOR_THE_JOB)
