"""``mpistrat run --elastic``: a job that goes on after the loss of a rank, in another run of its program."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mpistrat.cli.run.job import Job
from mpistrat.cli.run.running_job import SHARED, RunningJob, handlers
from mpistrat.launch.launch import HANG
from mpistrat.process.standby import IMPORTS
from mpistrat.runtime import affinity
from mpistrat.runtime.environment import RuntimeOptions

_SAME_STEP = 3  # losses at one step, after which the program itself is taken for the cause


def run_elastic(
    plan_for: Callable[[int], Job],
    ranks: int,
    environ: dict[str, str],
    fewer: bool,
    restarts: int,
    min_ranks: int,
    output: str | None,
    *,
    tag: bool,
    standby: bool,
) -> int:
    """Run a job, and again after each loss, and return the last exit status. ``plan_for`` makes the job of some ranks.

    After a loss there are ``fewer`` ranks, but not below ``min_ranks``, or as many, ``restarts`` times at most. A loss
    is the end of a rank by a signal that this process did not get, or a hang that the watchdog ended. An
    exception, an exit status and a signal to this process end the job, as without ``--elastic``. With ``standby`` the
    ranks of the next run are started when this one has done its first step, and wait.
    """
    if not SHARED.is_dir():
        raise click.ClickException(f"--elastic keeps copies in {SHARED}, which this system does not have")
    at: list[list[int]] = []  # the newest steps at each loss
    # Fewer ranks would get more threads each, and BLAS then adds in another order.
    environ |= {name: value for name, value, _ in plan_for(ranks).settings if name in affinity.THREADS}
    environ[RuntimeOptions.elastic_ranks.variable] = "fewer" if fewer else "same"
    jobs: list[RunningJob] = []  # the one that runs, and the one that waits
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

        def count(run: int) -> int:
            return min(ranks, max(min_ranks, ranks - run)) if fewer else ranks

        def start(run: int, imports: Path | None = None) -> None:
            numbered = {**environ, RuntimeOptions.restart.variable: str(run)}
            jobs.append(RunningJob(plan_for(count(run)), numbered, output, tag=tag, run=run, imports=imports))

        def meanwhile() -> None:
            while early:
                signal.raise_signal(early.pop(0))
            run = len(at)
            noted = folder / IMPORTS / str(run)
            if run < restarts and run not in prepared and len([*noted.parent.glob(f"{run}.*")]) == count(run):
                prepared.add(run)
                with contextlib.suppress(OSError, click.ClickException):  # then the next run is started after the loss
                    start(run + 1, noted)

        try:
            start(0)
            # Late imports, while the ranks import, too: NumPy, and the checkpoints.
            from mpistrat.monitor import last  # noqa: F401
            from mpistrat.training import elastic_copies

            while True:
                ended = jobs[0].finish(meanwhile)
                if ended.by_signal or not (ended.status > 128 or ended.status == HANG):  # 128 + the signal of a rank
                    return ended.status
                at.append(elastic_copies.newest_steps(folder))
                step = next((newest for newest in reversed(at[-1]) if newest), 0)
                cause = "a hang" if ended.status == HANG else f"the loss of {ended.lost or 'a rank'}"
                if at[-_SAME_STEP:] == [at[-1]] * _SAME_STEP or len(at) > restarts:
                    _say(f"gives up after {cause}: {len(at)} losses, {at.count(at[-1])} of them at step {step}")
                    return ended.status
                waited = len(jobs) == 2 and jobs[1].begin()
                for _ in range(1 if waited else len(jobs)):
                    jobs.pop(0).close()
                if not waited:
                    start(len(at))
                remaining = count(len(at))
                origin = f"the copy of step {step}" if step else "the newest checkpoint, without a copy"
                _say(f"goes on after {cause} with {remaining} rank{'s' if remaining > 1 else ''}, from {origin}")
        finally:
            for job in jobs:
                job.close()


def _say(text: str) -> None:
    os.write(2, f"mpistrat run: {text}\n".encode())
