"""How a job that was told to stop ends: put back into the queue, or with a status that says what shall become of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from mpistrat.runtime.process.exit_status import DONE, NO_PROGRESS, RESTART, STAY_AWAY

# A job that is put back is ended at once, scontrol with it, which would then not say that all went well.
_KEPT = ("/bin/sh", "-c", 'trap "" TERM; exec "$0" "$@"')


def seconds_left(environ: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Seconds until the job's time limit, None if the environment does not tell.

    Slurm sets ``SLURM_JOB_END_TIME`` from version 23.02 on.

    Examples
    --------
    >>> seconds_left({"SLURM_JOB_END_TIME": "1700000060"}, lambda: 1700000000)
    60.0
    """
    text = environ.get("SLURM_JOB_END_TIME", "")
    return float(text) - now() if text.isdecimal() and int(text) else None


def job_to_requeue(environ: Mapping[str, str]) -> str | None:
    """The number of the Slurm job by which it is put back into the queue, None outside of Slurm.

    Of a heterogeneous job that is the number of its first component; a task of an array has a number of its own.

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
    """Do for the job of this process what its end asks for. Of all ranks, one calls it.

    Parameters
    ----------
    environ : mapping
    comes_back : bool
        Whether those who told it to stop leave it to the job to come back.
    progress : bool
        Whether this run of the program has got anywhere.

    Returns
    -------
    tuple of (int, str)
        The exit status of all ranks, and why it is this one.
    """
    preempted = not comes_back and _is_preempted(environ)
    if not comes_back and not preempted:
        return STAY_AWAY, f"SIGTERM says that the job shall stay away: status {STAY_AWAY}"
    if not progress and not preempted:
        return NO_PROGRESS, (
            "the job is not put back into the queue: this run of it was told to stop before its first step was over, "
            f"and so would all others be; status {NO_PROGRESS}. Give it more time, or have it signalled later"
        )
    why_not = _requeue(environ)
    if why_not is None:
        return DONE, "the job was put back into the queue"
    return (
        RESTART,
        f"the job is not put back into the queue: {why_not}; status {RESTART} asks to be started again",
    )


def leave(status: int) -> None:
    """End this rank's program."""
    sys.stdout.flush()
    sys.exit(status)


def _requeue(environ: Mapping[str, str]) -> str | None:
    """Put the job of this process back into the queue of Slurm: why that was not possible, None if it was."""
    job = job_to_requeue(environ)
    if job is None:
        return "this is no job of Slurm (SLURM_JOB_ID is not set)"
    return _scontrol(environ, "requeue", job)[1]


def _is_preempted(environ: Mapping[str, str]) -> bool:
    """Whether Slurm has sent SIGTERM to make room for another job, and is still to end this one (``GraceTime``).

    Slurm puts back, or cancels, the jobs that are there when that time is over. One that has ended by itself before is
    over for good, unless it puts itself back.
    """
    job = job_to_requeue(environ)
    if job is None:
        return False
    said, _ = _scontrol(environ, "show", "job", "--oneliner", job)
    facts = dict(word.partition("=")[::2] for word in said.partition("\n")[0].split())
    since = facts.get("PreemptTime", "")
    # Also when an earlier run of the job was preempted: both are like 2026-11-21T12:25:58.
    return (
        facts.get("JobState") == "RUNNING" and since[:1].isdecimal() and since >= facts.get("StartTime", "")
    )


def _scontrol(environ: Mapping[str, str], *arguments: str) -> tuple[str, str | None]:
    """What ``scontrol`` printed, and what went wrong, None if nothing did."""
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
            env={**environ, "SLURM_TIME_FORMAT": "standard"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if ended.returncode == 0:
        return ended.stdout, None
    said = " ".join((ended.stderr + ended.stdout).split())
    return "", f"scontrol {' '.join(arguments)}: {said or f'status {ended.returncode}'}"
