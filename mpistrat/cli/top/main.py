"""``mpistrat top``: what each rank of a running job does, or did when the job ended."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from mpistrat.cli import table

if TYPE_CHECKING:
    from rich.table import Table

_EVERY = 2.0  # seconds


@click.command()
@click.option("--once", is_flag=True, help="Show the table once; the default without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of the table.")
@click.option("--stacks", is_flag=True, help="Show the Python stacks of all ranks, equal ones together.")
@click.option("--last", is_flag=True, help="Show the last record of a job that has ended.")
@click.argument("job", required=False)
def command(once: bool, as_json: bool, stacks: bool, last: bool, job: str | None) -> None:
    """Show what each rank of a running job does.

    JOB is the number of a Slurm job or of a process: a rank, or what started it. Without it, the only job
    of this user on this node is shown. Ranks on other nodes are shown for a Slurm job.

    \b
    mpistrat top
    mpistrat top 4711 --stacks
    mpistrat top --last            # after a crash
    """
    from mpistrat.cli.top import jobs

    try:
        if last:
            _show_last(as_json)
        elif stacks:
            _show_stacks(job)
        else:
            _follow(job, once, as_json)
    except jobs.NoJobError as error:
        raise click.ClickException(str(error)) from None


def _follow(job: str | None, once: bool, as_json: bool) -> None:
    import sys

    rows = _rows(job)
    if as_json:
        click.echo(json.dumps(rows))
        return
    console = table.console()
    if once or not sys.stdout.isatty():
        console.print(_table(rows))
        return
    from rich.live import Live

    from mpistrat.cli.top.jobs import NoJobError

    with Live(_table(rows), console=console, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(_EVERY)
                live.update(_table(_rows(job)), refresh=True)
        except (NoJobError, KeyboardInterrupt):  # it has ended
            pass


def _rows(job: str | None) -> list[dict[str, Any]]:
    from mpistrat.cli.top import jobs

    try:
        return jobs.rows(jobs.find(job))
    except jobs.NoJobError:
        import os
        import shutil

        if job is None or not shutil.which("srun") or "SLURM_STEP_ID" in os.environ:
            raise
        return jobs.on_all_nodes(job)


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    shown = Table(
        "rank", "host", "pid", "step", "step time", "phase", "for", "collective", "bytes/s", "memory"
    )
    for row in rows:
        seconds = row["step_seconds"]
        shown.add_row(
            str(row["rank"]),
            row["host"],
            str(row["pid"]),
            str(row["step"]),
            "" if seconds is None else f"{seconds:.3g} s",
            row["phase"],
            f"{row['for_seconds']:.3g} s",
            row["collective"],
            _amount(row["bytes_per_second"]),
            _amount(row["resident_bytes"]),
        )
    return shown


def _amount(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _show_stacks(job: str | None) -> None:
    from mpistrat.cli.top import jobs
    from mpistrat.monitor import report, view

    seen = view.look(jobs.find(job))
    for line in report.classes(seen, report.waits_in(seen)):
        click.echo(line)


def _show_last(as_json: bool) -> None:
    from mpistrat.cli.top import jobs
    from mpistrat.monitor import last, record_json, report, waits

    try:
        ended = last.latest()
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if ended is None:
        raise jobs.NoJobError("there is no record of a job that has ended: see MPISTRAT_RECORD_DIR")
    if as_json:
        click.echo(json.dumps([record_json.as_json(each) for each in ended.records]))
        return
    seen = jobs.view_of(ended)
    found = waits.waits(ended.records, ())
    click.echo(f"a job that ended at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(ended.when))}")
    for line in (
        *ended.notes,
        *report.causes(seen, found),
        "where all ranks were:",
        *report.classes(seen, found),
    ):
        click.echo(line)
