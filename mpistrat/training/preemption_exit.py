"""How a job that was told to stop ends: put back into the queue, or with a status that says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

# The status of a program that has saved and wants to be started again.
RESTART = 42


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


def requeue(environ: Mapping[str, str]) -> str | None:
    """Put the job of this process back into the queue of Slurm.

    Returns
    -------
    str or None
        Why that was not possible; None if it was.
    """
    job = job_to_requeue(environ)
    if job is None:
        return "this is no job of Slurm (SLURM_JOB_ID is not set)"
    program = shutil.which("scontrol", path=environ.get("PATH", os.defpath))
    if program is None:
        return "there is no scontrol on PATH on this node"
    try:
        ended = subprocess.run(
            [program, "requeue", job], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = (ended.stderr + ended.stdout).strip()
    return f"scontrol requeue {job}: {said or f'status {ended.returncode}'}" if ended.returncode else None


def leave(requeued: bool) -> None:
    """End this rank's program: successfully if the job will come back, else with status 42."""
    sys.stdout.flush()
    sys.exit(0 if requeued else RESTART)
