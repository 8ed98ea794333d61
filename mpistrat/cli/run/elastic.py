"""``mpistrat run --elastic``: a job that goes on after the loss of a rank, in another run of its program."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from mpistrat.cli.run.hosts import JobOnHosts, dealt, remove_copies
from mpistrat.cli.run.job import Job
from mpistrat.cli.run.running_job import SHARED, RunningJob, handlers
from mpistrat.launch.launch import HANG
from mpistrat.process.standby import IMPORTS
from mpistrat.runtime import affinity
from mpistrat.runtime.environment import RuntimeOptions

_SAME_STEP = 3  # losses at one step, after which the program itself is taken for the cause


def run_elastic(
    plan_for: Callable[[int, dict[str, int] | None], Job],
    ranks: int,
    environ: dict[str, str],
    fewer: bool,
    restarts: int,
    min_ranks: int,
    output: str | None,
    hosts: dict[str, int] | None = None,
    *,
    tag: bool,
    standby: bool,
) -> int:
    """Run a job, and again after each loss, and return the last exit status. ``plan_for`` makes the job of some ranks.

    After a loss there are ``fewer`` ranks, but not below ``min_ranks``, or as many, ``restarts`` times at most. A loss
    is the end of a rank by a signal that this process did not get, a hang that the watchdog ended, or the end of one of
    ``hosts``. An exception, an exit status and a signal to this process end the job, as without ``--elastic``. With
    ``standby`` the ranks of the next run are started when this one has done its first step, and wait.
    """
    if not SHARED.is_dir():
        raise click.ClickException(f"--elastic keeps copies in {SHARED}, which this system does not have")
    at: list[list[int]] = []  # the newest steps at each loss
    size = ranks  # of the current run
    # Fewer ranks would get more threads each, and BLAS then adds in another order.
    environ |= {name: value for name, value, _ in plan_for(ranks, hosts).settings if name in affinity.THREADS}
    environ[RuntimeOptions.elastic_ranks.variable] = "fewer" if fewer else "same"
    jobs: list[RunningJob | JobOnHosts] = []  # the one that runs, and the one that waits
    prepared: set[int] = set()  # runs whose next one was started
    early: list[int] = []  # signals between two runs, which are for the next one

    def keep(number: int, frame: Any) -> None:
        early.append(number)

    with (
        handlers(keep, keep),
        tempfile.TemporaryDirectory(prefix=f"mpistrat-elastic-{os.geteuid()}-", dir=SHARED) as name,
    ):
        folder = Path(name)
        environ[RuntimeOptions.elastic.variable] = name
        if standby:
            (folder / IMPORTS).mkdir()

        def after_loss(size: int) -> int:
            return min(ranks, max(min_ranks, size - 1)) if fewer else size

        def start(run: int, size: int, imports: Path | None = None) -> None:
            numbered = {**environ, RuntimeOptions.restart.variable: str(run)}
            job = plan_for(size, hosts)
            if hosts is None:
                jobs.append(RunningJob(job, numbered, output, tag=tag, run=run, imports=imports))
            else:
                jobs.append(JobOnHosts(job, numbered, folder))

        def meanwhile() -> None:
            while early:
                signal.raise_signal(early.pop(0))
            run = len(at)
            noted = folder / IMPORTS / str(run)
            if run < restarts and run not in prepared and len([*noted.parent.glob(f"{run}.*")]) == size:
                prepared.add(run)
                with contextlib.suppress(OSError, click.ClickException):  # then the next run is started after the loss
                    start(run + 1, after_loss(size), noted)

        try:
            start(0, size)
            # Late imports, beside those of the ranks: NumPy, and the checkpoints.
            from mpistrat.monitor import last  # noqa: F401
            from mpistrat.training.elastic import copies

            while True:
                ended = jobs[0].finish(meanwhile)
                if ended.by_signal or not (ended.status > 128 or ended.status == HANG):
                    return ended.status
                at.append(copies.newest_steps(folder))
                step = next((each for each in reversed(at[-1]) if each), 0)
                cause = "a hang" if ended.status == HANG else f"the loss of {ended.lost or 'a rank'}"
                if at[-_SAME_STEP:] == [at[-1]] * _SAME_STEP or len(at) > restarts:
                    _say(f"gives up after {cause}: {len(at)} losses, {at.count(at[-1])} of them at step {step}")
                    return ended.status
                size = after_loss(size)
                if hosts is not None:
                    hosts, size = _next_hosts(hosts, ended.hosts, size, min_ranks if fewer else ranks)
                    if not hosts:
                        _say(f"gives up after {cause}: no host answers")
                        return ended.status
                waited = len(jobs) == 2 and jobs[1].begin()
                for _ in range(1 if waited else len(jobs)):
                    jobs.pop(0).close()
                if not waited:
                    start(len(at), size)
                where = f"the copy of step {step}" if step else "the newest checkpoint, without a copy"
                _say(f"goes on after {cause} with {size} rank{'s' if size > 1 else ''}, from {where}")
        finally:
            for each in jobs:
                each.close()
            if hosts:
                remove_copies(plan_for(size, hosts), folder)


def _next_hosts(before: dict[str, int], left: Mapping[str, int], size: int, least: int) -> tuple[dict[str, int], int]:
    """Return the ranks of each host of the next run, and their sum: ``size``, or those of the hosts that are left."""
    if len(left) < len(before):
        size = min(sum(before.values()), max(least, sum(left.values())))
    return dealt(left, size), size


def _say(text: str) -> None:
    os.write(2, f"mpistrat run: {text}\n".encode())
