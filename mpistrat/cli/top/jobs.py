"""The jobs of this user on this node, and what each of their ranks does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpistrat.monitor import process, waits
from mpistrat.monitor.last import Ended
from mpistrat.monitor.view import View
from mpistrat.runtime.record import read
from mpistrat.runtime.record.read import Record

_STEPS = 20  # the last steps, for the time of a step
_SAMPLE = 0.2  # seconds between two looks, for the rate of bytes
_SRUN = ("srun", "--overlap", "--ntasks-per-node=1", "--quiet")


class NoJobError(Exception):
    """The job does not exist, or several could be meant."""


def find(what: str | None) -> list[Record]:
    """Return the records of one running job.

    Parameters
    ----------
    what : str or None
        The number of a batch job, of a process of the job, or of a process that started it. None for the only job.

    Raises
    ------
    NoJobError
    """
    jobs = grouped([each for each in read.records() if each.lives])
    if what is not None:
        jobs = [job for job in jobs if any(_is(record, what) for record in job)]
    if not jobs:
        of = "" if what is None else f" {what}"
        raise NoJobError(
            f"no job{of} of this user runs on this node, or it keeps no record (MPISTRAT_RECORD=0)"
        )
    if len(jobs) > 1:
        choices = "; ".join(f"{job[0].pid} ({len(job)} ranks: {job[0].program})" for job in jobs)
        raise NoJobError(
            f"several jobs of this user run on this node: name one by a process of it: {choices}"
        )
    return jobs[0]


def grouped(records: Sequence[Record]) -> list[list[Record]]:
    """Return records in groups that share a communicator."""
    rest, jobs = list(records), []
    while rest:
        job = waits.of_one_job(rest[0], rest) or [rest[0]]
        jobs.append(job)
        rest = [each for each in rest if each not in job]
    return jobs


def _is(record: Record, what: str) -> bool:
    if record.job and what in (record.job, record.job.partition(".")[0]):
        return True
    return what.isdigit() and int(what) in (record.pid, *_parents(record.pid))


def _parents(pid: int) -> list[int]:
    found: list[int] = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
        found.append(pid)
    return found


def rows(records: Sequence[Record], wait: float = _SAMPLE) -> list[dict[str, Any]]:
    """Return what each rank does, as values that JSON can hold. Looks twice, for the rate of bytes."""
    began = time.monotonic()
    before = {each.pid: each.bytes for each in records}
    time.sleep(wait)
    return [
        _row(read.read(each.path) or each, before[each.pid], time.monotonic() - began) for each in records
    ]


def _row(record: Record, bytes_before: int, seconds: float) -> dict[str, Any]:
    now = time.monotonic()
    facts = process.look(record.pid, record.started)
    inside = record.waits[0].last if record.waits else None
    steps = sorted(each[0] for each in record.steps[-_STEPS:])
    return {
        "rank": record.rank,
        "host": record.host,
        "pid": record.pid,
        "job": record.job,
        "step": record.step,
        "step_seconds": steps[len(steps) // 2] if steps else None,
        "phase": "collective" if inside is not None else record.phase.name.lower().replace("_", " "),
        "collective": "" if inside is None else f"{inside.operation} at {inside.place}",
        "number": None if inside is None else inside.number,
        "for_seconds": now - (record.phase_since if inside is None else inside.entered),
        "bytes_per_second": (record.bytes - bytes_before) / seconds,
        "resident_bytes": facts.resident,
        "state": facts.state,
    }


def on_all_nodes(job: str) -> list[dict[str, Any]]:
    """Return the rows of a Slurm job, which `srun` starts this command for on each of its nodes.

    Raises
    ------
    NoJobError
        If srun is missing or fails.
    """
    command = [*_SRUN, f"--jobid={job}", sys.executable, "-m", "mpistrat", "top", "--once", "--json", job]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoJobError(
            f"no job {job} of this user runs on this node, and srun does not work here: {error}"
        ) from None
    found: list[dict[str, Any]] = []
    for line in ended.stdout.splitlines():
        if line.startswith("["):
            found += json.loads(line)
    if not found:
        said = (ended.stderr or ended.stdout).strip().splitlines()
        raise NoJobError(f"no rank of job {job} was found: {said[-1] if said else 'srun said nothing'}")
    return sorted(found, key=lambda row: (row["rank"], row["pid"]))


def view_of(ended: Ended) -> View:
    """Return what is known of a job that has ended: its processes are gone."""
    return View(
        ended.when - ended.records[0].clock if ended.records else 0.0,
        ended.records,
        {each.key: process.gone() for each in ended.records},
        {},
        frozenset(),
    )
