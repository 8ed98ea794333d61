"""``mpistrat top``: what each rank of a running job does, or did when the job ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from mpistrat.cli import table
from mpistrat.cli.table import amount, counted, duration, echo
from mpistrat.launch.proc import batch_job, parent
from mpistrat.monitor import last as last_record
from mpistrat.monitor import process, report, view, waits
from mpistrat.monitor.last import EndedJob
from mpistrat.monitor.process import ProcessFacts
from mpistrat.monitor.stragglers import RankSteps, compare
from mpistrat.monitor.view import JobView
from mpistrat.process import children
from mpistrat.record import read
from mpistrat.record.read import Record, record_as_json

if TYPE_CHECKING:
    from rich.table import Table

_STEPS = 20  # the last steps, for the time of a step
_SAMPLE = 0.2  # seconds between two looks, for the rate of bytes
_SRUN = ("srun", "--overlap", "--ntasks-per-node=1", "--mpi=none", "--cpu-bind=none", "--quiet")
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_LIMIT = 60.0  # seconds for the answers of other nodes
_HERE = children.running("mpistrat", "top", "--here")
_EVERY = 2.0  # seconds between two updates of the table
_LEAST = (
    "memory",
    "bytes/s",
    "waits",
    "step time",
    "for",
    "phase",
    "collective",
)  # a narrow table drops columns in this order
_COLLECTIVE = 20  # columns in which a collective can be recognized


class NoJobError(Exception):
    """The job does not exist, or several could be meant: then ``choices`` has their records."""

    def __init__(self, text: str, choices: Sequence[Sequence[Record]] = ()):
        super().__init__(text)
        self.choices = choices


def find(number: str | None) -> list[Record]:
    """Return the records of one running job. Raise NoJobError if none or several may be meant.

    ``number`` is the number of a batch job, of a process of the job, or of one that started it. None is the only job.
    """
    jobs = waits.jobs_of(record for record in read.records() if record.lives)
    if number is not None:
        jobs = [job for job in jobs if any(_is_of(record, number) for record in job)]
    if not jobs:
        of = "" if number is None else f" {number}"
        raise NoJobError(f"no job{of} of this user runs on this node, or it keeps no record (MPISTRAT_RECORD=0)")
    if len(jobs) > 1:
        choices = "; ".join(f"{job[0].pid} ({counted(len(job), 'rank')}: {job[0].program})" for job in jobs)
        raise NoJobError(f"several jobs of this user run on this node: name one by a process of it: {choices}", jobs)
    return jobs[0]


def _is_of(record: Record, number: str) -> bool:
    if record.job and number in (record.job, _number(record)):
        return True
    return number.isdigit() and int(number) in (record.pid, *_parents(record.pid))


def _number(record: Record) -> str:
    """Return the number of a batch job, without the name of its server."""
    return record.job.partition(".")[0]


def _parents(pid: int) -> list[int]:
    parents: list[int] = []
    while (pid := parent(pid)) > 1:
        parents.append(pid)
    return parents


def rows(records: Sequence[Record], wait: float = _SAMPLE) -> list[dict[str, Any]]:
    """Return what each rank does, in the order of ranks, as values that JSON can hold. Looks twice, for rates."""
    records = sorted(records, key=lambda record: (record.rank, record.pid))
    measured = [RankSteps(record.rank, record.host, record.steps) for record in records]
    slow = {statistics.rank for statistics in compare(measured) if statistics.slow}
    began = time.monotonic()
    before = {record.pid: record.bytes for record in records}
    time.sleep(wait)
    result = []
    for record in records:
        row = _row(read.read(record.path) or record, before[record.pid], time.monotonic() - began)
        result.append({**row, "slow": record.rank in slow})
    return result


def _row(record: Record, bytes_before: int, seconds: float) -> dict[str, Any]:
    now = time.monotonic()
    facts = process.look(record.pid, record.started)
    inside = record.waits[0].last if record.waits else None
    left = record.entries[-1].left if record.entries else 0.0
    steps = sorted(step[0] for step in record.steps[-_STEPS:])
    waiting = sum(step[1] for step in record.steps[-_STEPS:])
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
    return not records or all(_number(record) == job for record in records)


def on_all_nodes(job: str, option: str) -> list[str]:
    """Return the lines that this command prints with an option on each node of a Slurm job.

    Raise NoJobError if srun is missing or fails, or the job does not run.
    """
    # Without the variables that describe the job or the step in which this command runs.
    kept = ("SLURM_CONF", "SLURM_JWT")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in kept}
    options = [f"--jobid={job}", *_nodes_option(job, environ)]
    return _answers([([*_SRUN, *options, *_HERE, option, job], environ)], f"job {job}")


def _nodes_option(job: str, environ: dict[str, str]) -> list[str]:
    """Return the option that lets srun use all nodes of a job, of which it would take one."""
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%D"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_LIMIT, check=False)
        if answer.stdout.strip().isdecimal():
            return [f"--nodes={answer.stdout.strip()}"]
    return []


def on_hosts(hosts: Sequence[str], option: str) -> list[str]:
    """Return the lines that this command prints with an option on some hosts, which ssh reaches.

    Raise NoJobError if none of them answers.
    """
    commands = [([*_SSH, "--", host, shlex.join((*_HERE, option))], dict(os.environ)) for host in hosts]
    return _answers(commands, f"a job on {', '.join(hosts)} (for a job of Slurm, give its number instead)")


def rows_in(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows in what this command has printed with ``--json``. Other lines are left out."""
    result: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            values = json.loads(line) if line.startswith("[") else []
            result += [row for row in values if isinstance(row, dict)]
    return sorted(result, key=lambda row: (row["rank"], row["pid"]))


def _answers(commands: Sequence[tuple[Sequence[str], dict[str, str]]], whose: str) -> list[str]:
    """Return the lines that commands print. They run at the same time."""
    started: list[tuple[str, subprocess.Popen[str]]] = []
    problems: list[str] = []
    lines: list[str] = []
    for command, environ in commands:
        try:
            child = subprocess.Popen(
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
            started.append((command[0], child))
    deadline = time.monotonic() + _LIMIT
    for name, child in started:
        try:
            out, err = child.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()[0], f"{name} took longer than {_LIMIT:g} s"
        lines += out.splitlines()
        if child.returncode:
            problems += err.strip().splitlines()[-1:]
    if not lines:
        raise NoJobError(f"no rank of {whose} was found: {'; '.join(problems) or 'there was no answer'}")
    for problem in problems:
        echo(problem, err=True)
    return lines


def view_of(ended: EndedJob) -> JobView:
    """Return the view of a job that has ended: its processes are gone."""
    facts = {}
    for record in ended.records:  # those that ended after the first one were not killed for want of memory
        kills = ended.out_of_memory_kills if ended.end.first in (None, record.rank) else None
        facts[record.key] = ProcessFacts("X", out_of_memory_kills=kills)
    now = ended.when - ended.records[0].clock if ended.records else 0.0
    return JobView(now, ended.records, facts, {}, frozenset(), end=ended.end)


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
    except NoJobError as error:
        raise click.ClickException(str(error)) from None


def _follow(job: tuple[str, ...], here: bool, once: bool, as_json: bool) -> None:
    try:
        rows = _rows(job, here)
    except NoJobError as error:
        if not error.choices or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise
        job = (_chosen(error.choices),)
        rows = _rows(job, here)
    if as_json:
        # srun mixes parts of lines longer than 1,024 bytes: with --here, each rank has a line of its own.
        for line in ([row] for row in rows) if here else [rows]:
            click.echo(json.dumps(line))
        return
    console = table.console()
    if once or not sys.stdout.isatty():
        console.print(_table(rows, console.width))
        return
    from rich.live import Live

    with _single_keys(), Live(_table(rows, console.width, cut=True), console=console, auto_refresh=False) as live:
        try:
            while not _is_quit(_EVERY):
                live.update(_table(_rows(job, here), console.width, cut=True), refresh=True)
            return
        except NoJobError as error:
            ended = str(error)
        except KeyboardInterrupt:
            return
    echo(f"the job has ended: {ended}", err=True)


def _chosen(choices: Sequence[Sequence[Record]]) -> str:
    """Ask for one of several jobs. Return the number of a process of it."""
    for number, job in enumerate(choices, 1):
        echo(f"{number:3}  {counted(len(job), 'rank'):>9}  process {job[0].pid:<8}  {job[0].program}")
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
    records, elsewhere = _records_or_output(job, here, "--json")
    if elsewhere is None:
        return rows(records)
    if not (answered := rows_in(elsewhere)):
        raise NoJobError(f"no rank of {' '.join(job)} was found: {elsewhere[-1]}")
    return answered


def _records_or_output(job: tuple[str, ...], here: bool, option: str) -> tuple[list[Record], list[str] | None]:
    """Return the records of a job on this node, or else the output of this command with an option on its nodes."""
    if len(job) > 1 and any(word.isdecimal() for word in job):
        raise NoJobError(f"give one JOB, or names of hosts, not {' '.join(job)}")
    name = job[0] if len(job) == 1 else None
    if len(job) > 1 or (name is not None and not here and not name[:1].isdigit()):
        return [], on_hosts(job, option)
    try:
        records = find(name)
    except NoJobError:
        if here or not may_be_elsewhere(name, ()):
            raise
        records = []
    if not here and name is not None and may_be_elsewhere(name, records):
        return [], on_all_nodes(name, option)
    return records, None


def _table(rows: list[dict[str, Any]], width: int, cut: bool = False) -> Table:
    """Return the table, without the columns that do not fit. With ``cut`` each rank has one line, in its place."""
    from rich.cells import cell_len
    from rich.text import Text

    cells = [_cells(row) for row in rows]
    widths = {name: max(cell_len(text) for text in (name, *(row[name] for row in cells))) + 2 for name in cells[0]}
    most = widths["collective"] - 2
    widths["collective"] = min(most, _COLLECTIVE) + 2
    left_out = []
    for name in _LEAST:
        if sum(widths.values()) >= width:
            left_out.append(name)
            del widths[name]
    programs = ", ".join(dict.fromkeys(row.get("program", "") for row in rows))
    wider = f" (a wider terminal shows {', '.join(reversed(left_out))})" if left_out else ""
    caption = Text(f"{programs}: {counted(len(rows), 'rank')}{wider}")  # brackets in a name are no markup
    shown = table.grid(caption=caption, caption_justify="left")
    for name in widths:
        # Rich shortens all columns alike: only the text of a collective may be cut.
        room = min(most, width - sum(widths.values()) + widths[name] - 2) if name == "collective" else None
        shown.add_column(name, no_wrap=cut, max_width=room, overflow="ellipsis" if cut or room is None else "fold")
    for row, texts in zip(rows, cells, strict=True):
        shown.add_row(*(texts[name] for name in widths), style="bold red" if row.get("slow") else None)
    return shown


def _cells(row: dict[str, Any]) -> dict[str, str]:
    seconds, waiting, slow = row["step_seconds"], row.get("waiting_share"), row.get("slow", False)
    return {
        **{name: str(row[name]) for name in ("rank", "host", "pid", "step")},
        "step time": "" if seconds is None else duration(seconds) + ", slow" * slow,
        "waits": "" if waiting is None else f"{waiting:.0%}",
        "phase": row["phase"],
        "for": duration(row["for_seconds"]),
        "collective": row["collective"],
        "bytes/s": amount(row["bytes_per_second"]),
        "memory": amount(row["resident_bytes"]),
    }


def _show_stacks(job: tuple[str, ...], here: bool) -> None:
    records, elsewhere = _records_or_output(job, here, "--stacks")
    if elsewhere is None:
        seen = view.look(records)
        hosts = ", ".join(sorted({record.host for record in records}))
        elsewhere = [f"on {hosts}:", *report.classes(seen, report.waits_in(seen))]
    echo("\n".join(elsewhere))  # in one piece: other nodes print at the same time


def _show_last(arguments: tuple[str, ...], as_json: bool) -> None:
    if len(arguments) > 1:
        raise click.UsageError("--last shows one job: give its number, or the file of its record")
    job = arguments[0] if arguments else batch_job()
    try:
        ended = last_record.load(job) if os.path.isfile(job) else last_record.latest(job)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if ended is None:
        of = f"job {job} that" if job else "a job that"
        raise NoJobError(f"there is no record of {of} has ended: see MPISTRAT_RECORD_DIR")
    if as_json:
        click.echo(json.dumps([record_as_json(record) for record in ended.records]))
        return
    seen = view_of(ended)
    at_end = last_record.waits_at_end(ended.records, ended.end.first)
    echo(f"a job that ended at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(ended.when))}")
    for line in (*ended.notes, *report.causes(seen, at_end), "where all ranks were:", *report.classes(seen, at_end)):
        echo(line)
