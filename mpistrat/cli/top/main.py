"""``mpistrat top``: what each rank of a running job does, or did when the job ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from mpistrat.cli import table
from mpistrat.cli.table import amount, counted, echo, three_digits
from mpistrat.cli.top import jobs
from mpistrat.launch.proc import batch_job
from mpistrat.monitor import last as last_record
from mpistrat.monitor import report, view
from mpistrat.record.read import Record, record_as_json

if TYPE_CHECKING:
    from rich.table import Table

_EVERY = 2.0  # seconds


@click.command()
@click.option("--once", is_flag=True, help="Show the table once; the default without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of the table.")
@click.option("--stacks", is_flag=True, help="Show the Python stacks of all ranks, equal ones together.")
@click.option("--last", is_flag=True, help="Show the last record of JOB, which has ended, or of a FILE.")
@click.option("--here", is_flag=True, help="Show only the ranks on this node.")
@click.argument("job", metavar="[JOB | HOST... | FILE]", nargs=-1)
def command(once: bool, as_json: bool, stacks: bool, last: bool, here: bool, job: tuple[str, ...]) -> None:
    """Show what each rank of a running job does.

    JOB is the number of a Slurm job or of a process: a rank, or what started it. Without it, the only job
    of this user on this node is shown; a terminal lists several to choose from. q ends the table. All nodes of a
    Slurm job are asked through srun, and each HOST through ssh.
    --last shows the job that ended last; inside a batch job, that of this batch job.

    \b
    mpistrat top
    mpistrat top 4711 --stacks
    mpistrat top node01 node02
    mpistrat top --last            # after a crash
    """
    try:
        if last:
            _show_last(job, as_json)
        elif stacks:
            _show_stacks(job, here)
        else:
            _follow(job, here, once, as_json)
    except jobs.NoJobError as error:
        raise click.ClickException(str(error)) from None


def _follow(job: tuple[str, ...], here: bool, once: bool, as_json: bool) -> None:
    try:
        rows = _rows(job, here)
    except jobs.NoJobError as error:
        if not error.choices or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise
        job = (_chosen(error.choices),)
        rows = _rows(job, here)
    if as_json:
        # srun mixes parts of lines longer than 1,024 bytes: with --here, each rank has a line of its own.
        for each in ([row] for row in rows) if here else [rows]:
            click.echo(json.dumps(each))
        return
    console = table.console()
    if once or not sys.stdout.isatty():
        console.print(_table(rows))
        return
    from rich.live import Live

    with _single_keys(), Live(_table(rows, cut=True), console=console, auto_refresh=False) as live:
        try:
            while not _is_quit(_EVERY):
                live.update(_table(_rows(job, here), cut=True), refresh=True)
            return
        except jobs.NoJobError as error:
            ended = str(error)
        except KeyboardInterrupt:
            return
    echo(f"the job has ended: {ended}", err=True)


def _chosen(choices: Sequence[Sequence[Record]]) -> str:
    """Ask for one of several jobs. Return the number of a process of it."""
    for number, each in enumerate(choices, 1):
        echo(f"{number:3}  {counted(len(each), 'rank'):>9}  process {each[0].pid:<8}  {each[0].program}")
    return str(choices[click.prompt("job", type=click.IntRange(1, len(choices))) - 1][0].pid)


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Let a key count without the end of its line, and without being shown."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(0)
    tty.setcbreak(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _is_quit(seconds: float) -> bool:
    """Wait. Return whether q was typed meanwhile."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    return bool(select.select([0], [], [], seconds)[0]) and os.read(0, 64).lower().startswith(b"q")


def _rows(job: tuple[str, ...], here: bool) -> list[dict[str, Any]]:
    records, elsewhere = _found(job, here, "--json")
    if elsewhere is None:
        return jobs.rows(records)
    rows = jobs.rows_in(elsewhere)
    if not rows:
        raise jobs.NoJobError(f"no rank of {' '.join(job)} was found: {elsewhere[-1]}")
    return rows


def _found(job: tuple[str, ...], here: bool, option: str) -> tuple[list[Record], list[str] | None]:
    """Return the records of a job on this node; or what this command prints with an option where the ranks are."""
    if len(job) > 1 and any(each.isdecimal() for each in job):
        raise jobs.NoJobError(f"give one JOB, or names of hosts, not {' '.join(job)}")
    name = job[0] if len(job) == 1 else None
    if len(job) > 1 or (name is not None and not here and not name[:1].isdigit()):
        return [], jobs.on_hosts(job, option)
    try:
        records = jobs.find(name)
    except jobs.NoJobError:
        if here or not jobs.may_be_elsewhere(name, ()):
            raise
        records = []
    if not here and name is not None and jobs.may_be_elsewhere(name, records):
        return [], jobs.on_all_nodes(name, option)
    return records, None


def _table(rows: list[dict[str, Any]], cut: bool = False) -> Table:
    """Return the table. With ``cut`` each rank has one line, so that rows stay where they are."""
    from rich.table import Table
    from rich.text import Text

    programs = ", ".join(dict.fromkeys(row.get("program", "") for row in rows))
    caption = Text(f"{programs}: {counted(len(rows), 'rank')}")  # brackets in a name are no markup
    shown = Table(caption=caption, caption_justify="left")
    for name in ("rank", "host", "pid", "step", "step time", "waits", "phase", "for"):
        shown.add_column(name, no_wrap=cut)
    shown.add_column("collective", no_wrap=cut, overflow="ellipsis" if cut else "fold")
    for name in ("bytes/s", "memory"):
        shown.add_column(name, no_wrap=cut)
    for row in rows:
        seconds, waiting = row["step_seconds"], row.get("waiting_share")
        slow = row.get("slow", False)
        shown.add_row(
            str(row["rank"]),
            row["host"],
            str(row["pid"]),
            str(row["step"]),
            "" if seconds is None else f"{three_digits(seconds)} s{', slow' * slow}",
            "" if waiting is None else f"{waiting:.0%}",
            row["phase"],
            f"{three_digits(row['for_seconds'])} s",
            row["collective"],
            amount(row["bytes_per_second"]),
            amount(row["resident_bytes"]),
            style="bold red" if slow else None,
        )
    return shown


def _show_stacks(job: tuple[str, ...], here: bool) -> None:
    records, elsewhere = _found(job, here, "--stacks")
    if elsewhere is None:
        seen = view.look(records)
        hosts = ", ".join(sorted({each.host for each in records}))
        elsewhere = [f"on {hosts}:", *report.classes(seen, report.waits_in(seen))]
    echo("\n".join(elsewhere))  # in one piece: other nodes print at the same time


def _show_last(given: tuple[str, ...], as_json: bool) -> None:
    if len(given) > 1:
        raise click.UsageError("--last shows one job: give its number, or the file of its record")
    job = given[0] if given else batch_job()
    try:
        ended = last_record.load(job) if os.path.isfile(job) else last_record.latest(job)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if ended is None:
        of = f"job {job} that" if job else "a job that"
        raise jobs.NoJobError(f"there is no record of {of} has ended: see MPISTRAT_RECORD_DIR")
    if as_json:
        click.echo(json.dumps([record_as_json(each) for each in ended.records]))
        return
    seen = jobs.view_of(ended)
    found = last_record.waits_at_end(ended.records, ended.end.first)
    echo(f"a job that ended at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(ended.when))}")
    for line in (*ended.notes, *report.causes(seen, found), "where all ranks were:", *report.classes(seen, found)):
        echo(line)
