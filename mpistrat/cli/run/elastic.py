"""``mpistrat run --elastic``: start a job again when a rank was lost, from the copies in memory of its state."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from mpistrat.cli.run import running_job
from mpistrat.cli.run.job import Job
from mpistrat.cli.run.running_job import SHARED
from mpistrat.launch.launch import HANG
from mpistrat.runtime import affinity
from mpistrat.runtime.environment import RuntimeOptions
from mpistrat.training.elastic import copies

_SAME_STEP = 3  # losses at one step, after which the program itself is taken for the cause


@dataclasses.dataclass(frozen=True)
class Elastic:
    """What follows a loss: ``fewer`` ranks, or as many, at most ``restarts`` times, and not below ``min_ranks``."""

    fewer: bool
    restarts: int
    min_ranks: int


def run(
    plan: Callable[[int], Job],
    ranks: int,
    environ: dict[str, str],
    elastic: Elastic,
    output: str | None = None,
    *,
    tag: bool = False,
) -> int:
    """Run a job, and again after each loss, and return the last exit status. ``plan`` makes the job of some ranks.

    A loss is the end of a rank by a signal that this process did not get, or a hang that the watchdog ended. An
    exception, an exit status and a signal to this process end the job, as without ``--elastic``.
    """
    at: list[list[int]] = []  # the newest steps at each loss
    # Fewer ranks would get more threads each, and BLAS then adds in another order.
    environ |= {name: value for name, value, _ in plan(ranks).settings if name in affinity.THREADS}
    with tempfile.TemporaryDirectory(prefix=f"mpistrat-elastic-{os.geteuid()}-", dir=_shared()) as name:
        folder = Path(name)
        for restart in range(elastic.restarts + 1):
            environ = {
                **environ,
                RuntimeOptions.elastic.variable: name,
                RuntimeOptions.restart.variable: str(restart),
                RuntimeOptions.elastic_ranks.variable: "fewer" if elastic.fewer else "same",
            }
            ended = running_job.run(plan(ranks), environ, output, tag=tag)
            if ended.by_signal or not (ended.status > 128 or ended.status == HANG):
                return ended.status
            at.append(copies.newest_steps(folder))
            step = next((each for each in reversed(at[-1]) if each), 0)
            cause = "a hang" if ended.status == HANG else f"the loss of {ended.lost or 'a rank'}"
            if at[-_SAME_STEP:] == [at[-1]] * _SAME_STEP or restart == elastic.restarts:
                _say(f"gives up after {cause}: {len(at)} losses, {at.count(at[-1])} of them at step {step}")
                return ended.status
            if elastic.fewer:
                ranks = max(elastic.min_ranks, ranks - 1)
            where = f"the copy of step {step}" if step else "the newest checkpoint, without a copy"
            _say(f"goes on after {cause} with {ranks} rank{'s' if ranks > 1 else ''}, from {where}")
    return ended.status


def _shared() -> str:
    if not SHARED.is_dir():
        raise click.ClickException(f"--elastic keeps copies in {SHARED}, which this system does not have")
    return str(SHARED)


def _say(text: str) -> None:
    os.write(2, f"mpistrat run: {text}\n".encode())
