"""The jobs of this user on this node, and what each of their ranks does."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from mpistrat.cli.table import counted, echo
from mpistrat.launch.proc import parent
from mpistrat.monitor import process, waits
from mpistrat.monitor.last import Ended
from mpistrat.monitor.process import ProcessFacts
from mpistrat.monitor.stragglers import Measured, compare
from mpistrat.monitor.view import JobView
from mpistrat.process import children
from mpistrat.record import read
from mpistrat.record.read import Record

_STEPS = 20  # the last steps, for the time of a step
_SAMPLE = 0.2  # seconds between two looks, for the rate of bytes
_SRUN = ("srun", "--overlap", "--ntasks-per-node=1", "--mpi=none", "--cpu-bind=none", "--quiet")
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_LIMIT = 60.0  # seconds for the answers of other nodes


_HERE = children.running("mpistrat", "top", "--here")


class NoJobError(Exception):
    """The job does not exist, or several could be meant: then ``choices`` has their records."""

    def __init__(self, text: str, choices: Sequence[Sequence[Record]] = ()):
        super().__init__(text)
        self.choices = choices


def find(what: str | None) -> list[Record]:
    """Return the records of one running job. Raise NoJobError if none or several may be meant.

    ``what`` is the number of a batch job, of a process of the job, or of one that started it. None is the only job.
    """
    jobs = waits.jobs_of(each for each in read.records() if each.lives)
    if what is not None:
        jobs = [job for job in jobs if any(_is(record, what) for record in job)]
    if not jobs:
        of = "" if what is None else f" {what}"
        raise NoJobError(f"no job{of} of this user runs on this node, or it keeps no record (MPISTRAT_RECORD=0)")
    if len(jobs) > 1:
        choices = "; ".join(f"{job[0].pid} ({counted(len(job), 'rank')}: {job[0].program})" for job in jobs)
        raise NoJobError(f"several jobs of this user run on this node: name one by a process of it: {choices}", jobs)
    return jobs[0]


def _is(record: Record, what: str) -> bool:
    if record.job and what in (record.job, _number(record)):
        return True
    return what.isdigit() and int(what) in (record.pid, *_parents(record.pid))


def _number(record: Record) -> str:
    """Return the number of a batch job, without the name of its server."""
    return record.job.partition(".")[0]


def _parents(pid: int) -> list[int]:
    found: list[int] = []
    while (pid := parent(pid)) > 1:
        found.append(pid)
    return found


def rows(records: Sequence[Record], wait: float = _SAMPLE) -> list[dict[str, Any]]:
    """Return what each rank does, in the order of ranks, as values that JSON can hold. Looks twice, for rates."""
    records = sorted(records, key=lambda each: (each.rank, each.pid))
    slow = {
        each.rank for each in compare([Measured(each.rank, each.host, each.steps) for each in records]) if each.slow
    }
    began = time.monotonic()
    before = {each.pid: each.bytes for each in records}
    time.sleep(wait)
    return [
        {**_row(read.read(each.path) or each, before[each.pid], time.monotonic() - began), "slow": each.rank in slow}
        for each in records
    ]


def _row(record: Record, bytes_before: int, seconds: float) -> dict[str, Any]:
    now = time.monotonic()
    facts = process.look(record.pid, record.started)
    inside = record.waits[0].last if record.waits else None
    left = record.entries[-1].left if record.entries else 0.0
    steps = sorted(each[0] for each in record.steps[-_STEPS:])
    waiting = sum(each[1] for each in record.steps[-_STEPS:])
    return {
        "program": record.program,
        "rank": record.rank,
        "host": record.host,
        "pid": record.pid,
        "job": record.job,
        "step": record.step,
        "step_seconds": steps[len(steps) // 2] if steps else None,
        "waiting_share": waiting / sum(steps) if sum(steps) else None,
        "phase": "collective" if inside is not None else record.phase.name.lower().replace("_", " "),
        "collective": "" if inside is None else f"{inside.operation} at {inside.place}",
        "number": None if inside is None else inside.number,
        "for_seconds": now - (max(record.phase_since, left) if inside is None else inside.entered),
        "bytes_per_second": (record.bytes - bytes_before) / seconds,
        "resident_bytes": facts.resident,
        "state": facts.state,
    }


def may_be_elsewhere(job: str | None, records: Sequence[Record]) -> bool:
    """Return whether a job is, or may be, one of Slurm with ranks that have no record on this node."""
    if job is None or not shutil.which("srun") or (records and len(records) >= records[0].size):
        return False
    return not records or all(_number(each) == job for each in records)


def on_all_nodes(job: str, option: str) -> list[str]:
    """Return what this command prints with an option on each node of a Slurm job, in lines.

    Raise NoJobError if srun is missing or fails, or the job does not run.
    """
    # Without the variables that describe the job or the step in which this command runs.
    kept = ("SLURM_CONF", "SLURM_JWT")
    environ = {name: each for name, each in os.environ.items() if not name.startswith("SLURM_") or name in kept}
    where = [f"--jobid={job}", *_nodes_option(job, environ)]
    return _answers([([*_SRUN, *where, *_HERE, option, job], environ)], f"job {job}")


def _nodes_option(job: str, environ: dict[str, str]) -> list[str]:
    """Return the option that lets srun use all nodes of a job: it takes one where it is not told how many there are."""
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%D"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_LIMIT, check=False)
        if said.stdout.strip().isdecimal():
            return [f"--nodes={said.stdout.strip()}"]
    return []


def on_hosts(hosts: Sequence[str], option: str) -> list[str]:
    """Return what this command prints with an option on some hosts, which ssh reaches, in lines.

    Raise NoJobError if none of them answers.
    """
    commands = [([*_SSH, "--", host, shlex.join((*_HERE, option))], dict(os.environ)) for host in hosts]
    return _answers(commands, f"a job on {', '.join(hosts)} (for a job of Slurm, give its number instead)")


def rows_in(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows in what this command has printed with ``--json``. Other lines are left out."""
    found: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            told = json.loads(line) if line.startswith("[") else []
            found += [each for each in told if isinstance(each, dict)]
    return sorted(found, key=lambda row: (row["rank"], row["pid"]))


def _answers(commands: Sequence[tuple[Sequence[str], dict[str, str]]], whose: str) -> list[str]:
    """Return the lines that commands print. They run at the same time."""
    started: list[tuple[str, subprocess.Popen[str]]] = []
    problems: list[str] = []
    lines: list[str] = []
    for command, environ in commands:
        try:
            one = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        except OSError as error:
            problems.append(str(error))
        else:
            started.append((command[0], one))
    deadline = time.monotonic() + _LIMIT
    for name, one in started:
        try:
            out, err = one.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
            out, err = one.communicate()[0], f"{name} took longer than {_LIMIT:g} s"
        lines += out.splitlines()
        if one.returncode:
            problems += err.strip().splitlines()[-1:]
    if not lines:
        raise NoJobError(f"no rank of {whose} was found: {'; '.join(problems) or 'there was no answer'}")
    for problem in problems:
        echo(problem, err=True)
    return lines


def view_of(ended: Ended) -> JobView:
    """Return what is known of a job that has ended: its processes are gone."""
    facts = {}
    for each in ended.records:  # those that ended after the first one were not killed for want of memory
        kills = ended.out_of_memory_kills if ended.end.first in (None, each.rank) else None
        facts[each.key] = ProcessFacts("X", out_of_memory_kills=kills)
    now = ended.when - ended.records[0].clock if ended.records else 0.0
    return JobView(now, ended.records, facts, {}, frozenset(), end=ended.end)
