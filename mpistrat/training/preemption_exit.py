"""The end of a job that was told to stop: the signals that say so, and requeueing or an exit status after them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from mpistrat.launch.launch import DONE, NO_PROGRESS, RESTART, STAY_AWAY

# A requeued job ends at once, scontrol with it: without the trap, scontrol would not report its success.
_KEPT = ("/bin/sh", "-c", 'trap "" TERM; exec "$0" "$@"')
# The scheduler or the user ends a job by SIGTERM. `sbatch --signal` sends one of the other two.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_watchers: weakref.WeakSet[PreemptionWatcher] = weakref.WeakSet()
_previous: dict[int, Any] = {}


def seconds_left(environ: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Return the seconds until the time limit of the job, or None if the environment does not have it.

    Slurm sets ``SLURM_JOB_END_TIME`` from version 23.02 on.

    Examples
    --------
    >>> seconds_left({"SLURM_JOB_END_TIME": "1700000060"}, lambda: 1700000000)
    60.0
    """
    text = environ.get("SLURM_JOB_END_TIME", "")
    return float(text) - now() if text.isdecimal() and int(text) else None


def job_to_requeue(environ: Mapping[str, str]) -> str | None:
    """Return the number by which Slurm requeues this job, or None outside of Slurm.

    For a heterogeneous job it is the number of the first component. A task of a job array has its own number.

    Examples
    --------
    >>> job_to_requeue({"SLURM_JOB_ID": "28", "SLURM_JOB_ID_HET_GROUP_0": "27"})
    '27'
    """
    for name in ("SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID_PACK_GROUP_0", "SLURM_JOB_ID", "SLURM_JOBID"):
        if environ.get(name):
            return environ[name]
    return None


def end(environ: Mapping[str, str], *, comes_back: bool, progress: bool) -> tuple[int, str]:
    """Requeue the job of this process, or choose an exit status. Call it on one rank only.

    ``comes_back`` says whether the job itself decides if it runs again, and ``progress`` whether this run of the
    program completed a step. Return the exit status for all ranks, and the reason for it.
    """
    preempted = not comes_back and _is_preempted(environ)
    if not comes_back and not preempted:
        return STAY_AWAY, f"after SIGTERM the job is not requeued: status {STAY_AWAY}"
    if not progress and not preempted:
        return NO_PROGRESS, (
            "the job is not put back into the queue: this run was told to stop before its first step was over, and "
            f"later runs would be too; status {NO_PROGRESS}. Give the job more time, or let the signal come later"
        )
    job = job_to_requeue(environ)
    why_not: str | None = "this is not a Slurm job (SLURM_JOB_ID is not set)"
    if job is not None:
        _, why_not = _scontrol(environ, "requeue", job)
    if why_not is None:
        return DONE, "the job was put back into the queue"
    return (RESTART, f"the job is not put back into the queue: {why_not}; status {RESTART} asks to be started again")


def leave(status: int) -> None:
    """End this rank's program."""
    sys.stdout.flush()
    sys.exit(status)


def _is_preempted(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm preempts this job and has not ended it yet (``GraceTime``).

    Slurm requeues, or cancels, the jobs that still run after that time. A job that ends earlier does not come back,
    unless it requeues itself.
    """
    job = job_to_requeue(environ)
    if job is None:
        return False
    answer, _ = _scontrol(environ, "show", "job", "--oneliner", job)
    facts = dict(word.partition("=")[::2] for word in answer.partition("\n")[0].split())
    since = facts.get("PreemptTime", "")
    # PreemptTime may be of an earlier run of the job. ISO times compare as text (2026-11-21T12:25:58).
    return facts.get("JobState") == "RUNNING" and since[:1].isdecimal() and since >= facts.get("StartTime", "")


def _scontrol(environ: Mapping[str, str], *arguments: str) -> tuple[str, str | None]:
    """Run ``scontrol``. Return its output, and an error or None."""
    program = shutil.which("scontrol", path=environ.get("PATH", os.defpath))
    if program is None:
        return "", "there is no scontrol on PATH on this node"
    try:
        ended = subprocess.run(
            [*_KEPT, program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            # The user may have set another format, which does not compare as text.
            env={**environ, "SLURM_TIME_FORMAT": "standard"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if ended.returncode == 0:
        return ended.stdout, None
    output = " ".join((ended.stderr + ended.stdout).split())
    return "", f"scontrol {' '.join(arguments)}: {output or f'status {ended.returncode}'}"


class PreemptionWatcher:
    """A watcher for the signals that announce the end of this process: SIGTERM, SIGUSR1 or SIGUSR2.

    While it exists, these signals do not end the process. The first one is kept as the message. A handler that the
    program installed earlier is called as well. A signal that the program ignores stays ignored.

    Raises
    ------
    RuntimeError
        If it is not created in the main thread: Python allows only that thread to handle signals.

    Examples
    --------
    >>> import os, signal
    >>> watcher = PreemptionWatcher()
    >>> watcher.preemption_message
    >>> os.kill(os.getpid(), signal.SIGUSR2)
    >>> watcher.preemption_message.split(" at ")[0]
    'SIGUSR2'
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "only the main thread can watch signals: create PreemptionWatcher and PreemptionCheckpointHandler there"
            )
        self._message: str | None = None
        self._signals: list[signal.Signals] = []
        _watchers.add(self)
        for number in SIGNALS:
            current = signal.getsignal(number)
            # A signal that was ignored when the program began stays ignored.
            if current not in (_handle, signal.SIG_IGN):
                _previous[number] = current
                signal.signal(number, _handle)
                signal.siginterrupt(number, False)  # reads and writes of C libraries go on

    @property
    def preemption_message(self) -> str | None:
        """The signal that announced the end of this process and its time, or None."""
        return self._message

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """The signals that arrived, each once, in order."""
        return tuple(self._signals)

    def clear(self) -> None:
        """Forget the signals that arrived."""
        self._message, self._signals = None, []

    def block_until_worker_exit(self) -> None:
        """Wait until this process is ended if that was announced, else return at once."""
        while self._message is not None:
            time.sleep(1)

    def _notice(self, number: int) -> None:
        received = signal.Signals(number)
        if self._message is None:
            self._message = f"{received.name} at {time.strftime('%H:%M:%S')}"
        if received not in self._signals:
            self._signals.append(received)


def _handle(number: int, frame: FrameType | None) -> None:
    watchers = list(_watchers)
    for watcher in watchers:
        watcher._notice(number)
    # The program may have a handler of its own: it is called after the watchers.
    previous = _previous.get(number)
    if callable(previous):
        previous(number, frame)
    elif not watchers:  # no watcher is left: do what the signal does by default
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
