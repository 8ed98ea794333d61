"""``mpistrat trace``: the traces of the ranks of a job, merged or summarized."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mpistrat.cli.table import echo
from mpistrat.cli.trace import chrome, files, spans, summary
from mpistrat.cli.trace.files import Trace
from mpistrat.runtime.agreement.operation import ranks_in_words


@click.command()
@click.option("-o", "--output", metavar="FILE", help="Write one file for Perfetto, compressed if it ends in .gz.")
@click.option("--summary", "summarize", is_flag=True, help="Show shares of phases, collectives and waiting ranks.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one line of JSON.")
@click.option(
    "--job",
    "number",
    type=click.IntRange(min=1),
    help="Of several jobs in DIR; 1 is the oldest.  [default: the newest]",
)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def command(output: str | None, summarize: bool, as_json: bool, number: int | None, directory: Path) -> None:
    """Merge the traces of all ranks of a job into one file, or summarize them.

    DIR has the traces that `mpistrat run --trace DIR`, MPISTRAT_TRACE=DIR or `mpistrat.experimental.trace(DIR)` wrote.
    Open the file at https://ui.perfetto.dev, which shows it in the browser and sends it nowhere.

    \b
    mpistrat trace traces -o trace.json.gz
    mpistrat trace traces --summary
    """
    if not (output or summarize or as_json):
        raise click.UsageError("say what to make of the traces: -o FILE, --summary or --json")
    try:
        found, problems = files.traces(directory)
    except files.NotATraceError as error:
        raise click.ClickException(str(error)) from None
    for problem in problems:
        _warn(f"{problem}; it is left out")
    job = _chosen(files.jobs(found), number, directory)
    clocks, problems = files.aligned(job)
    for problem in (*_faults(job), *problems):
        _warn(problem)
    tracks = [track for each in job for track in spans.tracks(each, clocks[each])]
    told = {**_facts(job, max(clock.error for clock in clocks.values())), **summary.summary(tracks)}
    if output:
        try:
            count = chrome.write(Path(output), tracks, _facts(job, 0.0))
        except OSError as error:
            raise click.ClickException(f"{output} cannot be written: {error.strerror}") from None
        click.echo(f"{output}: {count} events of {told['size']} ranks; open it at https://ui.perfetto.dev", err=True)
    if as_json:
        click.echo(json.dumps(told))
    elif summarize:
        for line in (_title(told), "", *summary.lines(told)):
            echo(line)


def _warn(text: str) -> None:
    echo(f"warning: {text}", err=True)


def _chosen(jobs: list[list[Trace]], number: int | None, directory: Path) -> list[Trace]:
    if not jobs:
        raise click.ClickException(
            f"{directory} has no traces: start the job with `mpistrat run --trace {directory}`, or with "
            f"MPISTRAT_TRACE={directory}"
        )
    if number is not None and number > len(jobs):
        raise click.ClickException(f"{directory} has the traces of {len(jobs)} jobs: there is no job {number}")
    if number is None and len(jobs) > 1:
        for i, job in enumerate(jobs, 1):
            _warn(f"{directory} has {len(jobs)} jobs: --job {i} is {_title(_facts(job, 0.0))}")
        _warn(f"the newest is taken, --job {len(jobs)}")
    return jobs[-1 if number is None else number - 1]


def _facts(job: Sequence[Trace], error: float) -> dict[str, Any]:
    first = job[0]
    began = min(each.epoch + each.began for each in job)
    return {
        "program": first.program,
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began)),
        "size": len({each.rank for each in job}),
        "hosts": len({(each.host, each.clock) for each in job}),
        "clock_error_seconds": error if error < float("inf") else None,
    }


def _title(facts: dict[str, Any]) -> str:
    ranks, hosts = facts["size"], facts["hosts"]
    return (
        f"{facts['program'] or 'a program'}, {ranks} rank{'s' * (ranks > 1)} on {hosts} node{'s' * (hosts > 1)}, "
        f"{facts['began']}"
    )


def _faults(job: Sequence[Trace]) -> list[str]:
    found = [f"{each.path}: {each.problem}" for each in job if each.problem]
    missing = sorted(set(range(max(each.size for each in job))) - {each.rank for each in job})
    if missing:
        found.append(f"there is no trace of {ranks_in_words(missing)}: were they written to another directory?")
    running = sorted({each.rank for each in job if not each.complete})
    if running:
        found.append(f"the trace of {ranks_in_words(running)} does not end: a process was killed, or still runs")
    forgotten = [each.forgotten for each in job if each.forgotten]
    if forgotten:
        found.append(f"{len(forgotten)} ranks lack up to {max(forgotten)} older events: raise MPISTRAT_TRACE_BYTES")
    return found
