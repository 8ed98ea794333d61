"""``mpistrat trace``: the traces of the ranks of a job in one file for Perfetto, or in numbers.

The file has the trace event format, which Perfetto and chrome://tracing read. The numbers are the share of each phase,
the collectives that took longest, and the ranks that came last.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from mpistrat.cli import trace_files
from mpistrat.cli.table import aligned, amount, duration, echo
from mpistrat.cli.trace_files import MEET, PHASES, Call, Span, Trace, Track, shares
from mpistrat.process import files
from mpistrat.runtime.agreement.operation import ranks_in_words

# Threads get this number times 1 and more, plus their rank. Perfetto takes thread 0 for an idle core, and a thread that
# has the number of a process for a thread of that process.
_THREAD = 1_000_000
_MOST_COLLECTIVES = 10
_COLLECTIVE = 72  # columns of its text: the numbers before it take at most 48
# Operations that send their values to other ranks. The others only compare them, so they have no bytes per second.
_MOVES = ("all_reduce", "all_gather", "broadcast", "gather", "reduce_scatter")


def write_chrome(path: Path, tracks: Sequence[Track], facts: dict[str, Any]) -> int:
    """Write the file, compressed if its name ends in ``.gz``. Return the number of events.

    Raise OSError if the file cannot be written.
    """
    with files.appearing(path, replace=True) as temporary:
        if path.name.endswith(".gz"):
            with gzip.open(temporary, "wt", compresslevel=5, encoding="utf-8") as file:
                return _write_chrome(file, tracks, facts)
        with open(temporary, "w", encoding="utf-8") as file:
            return _write_chrome(file, tracks, facts)


def _write_chrome(file: TextIO, tracks: Sequence[Track], facts: dict[str, Any]) -> int:
    count = 0

    def put(text: str) -> None:
        nonlocal count
        file.write(",\n" + text if count else text)
        count += 1

    file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(facts) + ', "traceEvents": [\n')
    nodes = {host: pid for pid, host in enumerate(dict.fromkeys(track.host for track in tracks), 1)}
    origin = min((track.spans[0].begin for track in tracks if track.spans), default=0)
    for (name, _), pid in nodes.items():
        put(_metadata("process_name", pid, 0, name=f"node {name}"))
        put(_metadata("process_sort_index", pid, 0, sort_index=pid))
    flows: dict[tuple[int, int], dict[int, tuple[int, int, int]]] = {}
    named = set()
    for track in tracks:
        pid, tid = nodes[track.host], track.rank + _THREAD * (track.thread + 1)
        if (pid, tid) not in named:
            named.add((pid, tid))
            thread = f", thread {track.thread}" if track.thread else ""
            put(_metadata("thread_name", pid, tid, name=f"rank {track.rank}{thread}"))
            put(_metadata("thread_sort_index", pid, tid, sort_index=tid))
        _put_track(put, track, pid, tid, origin)
        for span in track.spans:
            if span.call is not None and span.call.communicator:
                key = span.call.communicator, span.call.number
                # A collective that was interrupted may be repeated: the last one counts.
                flows.setdefault(key, {})[track.rank] = span.begin - origin, pid, tid
    for i, ends in enumerate(flows.values()):
        _put_flow(put, i + 1, sorted(ends.values()))
    file.write("\n]}\n")
    return count


def _metadata(event: str, pid: int, tid: int, **values: Any) -> str:
    return json.dumps({"ph": "M", "name": event, "pid": pid, "tid": tid, "args": values})


def _put_track(put: Callable[[str], None], track: Track, pid: int, tid: int, origin: int) -> None:
    names: dict[str, str] = {}
    places: dict[str, str] = {}
    for span in track.spans:
        name = names.get(span.name) or names.setdefault(span.name, json.dumps(span.name))
        arguments = f', "args": {_arguments(span.call, places)}' if span.call is not None else ""
        kind = "collective" if span.call is not None else "phase"
        put(
            f'{{"ph": "X", "name": {name}, "cat": "{kind}", "pid": {pid}, "tid": {tid}, '
            f'"ts": {_microseconds(span.begin - origin)}, "dur": {_microseconds(span.end - span.begin)}{arguments}}}'
        )
    for number, at in enumerate(track.steps, 1):
        put(
            f'{{"ph": "i", "s": "t", "name": "end of step {number}", "cat": "step", "pid": {pid}, "tid": {tid}, '
            f'"ts": {_microseconds(at - origin)}}}'
        )


def _arguments(call: Call, places: dict[str, str]) -> str:
    place = places.get(call.place) or places.setdefault(call.place, json.dumps(call.place))
    finished = "" if call.finished else ', "finished": false'
    return f'{{"at": {place}, "number": {call.number}, "bytes": {call.nbytes}, "ranks": {call.size}{finished}}}'


def _put_flow(put: Callable[[str], None], number: int, ends: Sequence[tuple[int, int, int]]) -> None:
    if len(ends) < 2:
        return
    for i, (at, pid, tid) in enumerate(ends):
        kind = '"s"' if i == 0 else '"f", "bp": "e"' if i == len(ends) - 1 else '"t"'
        put(
            f'{{"ph": {kind}, "id": {number}, "name": "collective", "cat": "collective", "pid": {pid}, '
            f'"tid": {tid}, "ts": {_microseconds(at)}}}'
        )


def _microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def summarized(tracks: Sequence[Track]) -> dict[str, Any]:
    """Return the numbers of a trace, as values that JSON can hold. Times are in seconds.

    ``ranks`` has the host, seconds, steps and share of each phase by rank. ``collectives`` has the ones that took
    longest. ``imbalance`` is the share by which the busiest rank was busier than the mean. ``last`` is how often each
    rank came last to a collective. ``waited`` is the mean time for which a rank waited for others.
    """
    main = [track for track in tracks if track.thread == 0]
    ranks: dict[int, dict[str, Any]] = {}
    for track in main:
        row = ranks.setdefault(
            track.rank, {"rank": track.rank, "host": track.host[0], "steps": 0, "phases": dict.fromkeys(PHASES, 0.0)}
        )
        row["steps"] += len(track.steps)
        for phase, nanoseconds in shares(track.spans).items():
            row["phases"][phase] += nanoseconds / 1e9
    for row in ranks.values():
        row["seconds"] = sum(row["phases"].values())
        row["shares"] = {name: seconds / (row["seconds"] or 1.0) for name, seconds in row.pop("phases").items()}
    busy = [row["seconds"] * (1 - row["shares"][MEET]) for row in ranks.values()]
    mean = sum(busy) / max(1, len(busy))
    collectives, last = _collectives(tracks)
    return {
        "ranks": list(ranks.values()),
        "collectives": collectives,
        "imbalance": max(busy) / mean - 1 if mean else 0.0,
        "waited": sum(row["seconds"] * row["shares"][MEET] for row in ranks.values()) / max(1, len(ranks)),
        "last": [{"rank": rank, "collectives": count} for rank, count in last.most_common()],
    }


def _collectives(tracks: Sequence[Track]) -> tuple[list[dict[str, Any]], Counter[int]]:
    calls: dict[tuple[str, str], list[Any]] = {}
    arrivals: dict[tuple[int, int], dict[int, int]] = {}
    for track in tracks:
        for index, span in enumerate(track.spans):
            call = span.call
            if call is None:
                continue
            totals = calls.setdefault((call.operation, call.place), [0, 0, 0, 0])
            totals[0] += 1
            totals[1] += span.end - span.begin
            totals[2] += _waited(track.spans, index)
            totals[3] = call.nbytes
            if call.size > 1:
                arrivals.setdefault((call.communicator, call.number), {})[track.rank] = span.begin
    ranks = len({track.rank for track in tracks})
    rows = []
    for (operation, place), (count, total, waited, nbytes) in calls.items():
        moving = (total - waited) / count if operation.split(" ")[0] in _MOVES else 0.0
        rows.append(
            {
                "operation": operation,
                "place": place,
                "calls_per_rank": count / ranks,
                "seconds_per_call": total / count / 1e9,
                "waited_per_call": waited / count / 1e9,
                "bytes": nbytes,
                "bytes_per_second": nbytes / moving * 1e9 if moving else 0.0,
            }
        )
    rows.sort(key=lambda row: -row["seconds_per_call"] * row["calls_per_rank"])
    last = Counter(max(begins, key=lambda rank: begins[rank]) for begins in arrivals.values() if len(begins) > 1)
    return rows[:_MOST_COLLECTIVES], last


def _waited(spans: Sequence[Span], index: int) -> int:
    """Return for how long a collective waited for the other ranks."""
    waited, end = 0, spans[index].end
    for inner in spans[index + 1 :]:
        if inner.begin >= end:
            break
        if inner.name == MEET:
            waited += inner.own
    return waited


def lines(summary: dict[str, Any]) -> list[str]:
    """Return the numbers as text."""
    ranks = summary["ranks"]
    shown = [f"{'phase':<14} {'mean':>7}  {'least':>7} (rank)  {'most':>7} (rank)"]
    for phase in PHASES:
        ranked = sorted((row["shares"][phase], row["rank"]) for row in ranks)
        if ranked[-1][0]:
            mean = sum(share for share, _ in ranked) / len(ranked)
            (least, first), (most, last) = ranked[0], ranked[-1]
            shown.append(f"{phase:<14} {mean:7.2%}  {least:7.2%} {f'({first})':<6}  {most:7.2%} ({last})")
    if summary["collectives"]:
        rows = [("calls", "a call", "waiting", "bytes", "bytes/s", "collective"), *map(_cells, summary["collectives"])]
        shown += ["", *aligned(rows, numbers=5)]
    if len(ranks) > 1:
        waited = f"a rank waited {duration(summary['waited'])} for others"
        shown += ["", f"{waited}; the busiest rank had {summary['imbalance']:.1%} more to do than the mean"]
        number = sum(row["collectives"] for row in summary["last"])
        most = ", ".join(f"rank {row['rank']} {row['collectives'] / number:.0%}" for row in summary["last"][:4])
        if most:
            shown.append(f"last in {number} collectives: {most}")
    return shown


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the texts of a collective's line, which is at most 120 columns wide."""
    rate = amount(row["bytes_per_second"]) if row["bytes_per_second"] else ""
    times = duration(row["seconds_per_call"]), duration(row["waited_per_call"])
    collective = _short(f"{row['operation']} at {row['place'] or '?'}", _COLLECTIVE)
    return f"{row['calls_per_rank']:.0f}", *times, amount(row["bytes"]), rate, collective


def _short(text: str, width: int) -> str:
    """Return a text whose beginning and end are left where it is longer than a width."""
    end = width // 2
    return text if len(text) <= width else f"{text[: width - end - 1]}…{text[-end:]}"


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
        traces, problems = trace_files.traces(directory)
    except trace_files.NotATraceError as error:
        raise click.ClickException(str(error)) from None
    for problem in problems:
        _warn(f"{problem}; it is left out")
    job = _chosen(trace_files.jobs(traces), number, directory)
    clocks, problems = trace_files.aligned(job)
    for problem in (*_faults(job), *problems):
        _warn(problem)
    tracks = [track for trace in job for track in trace_files.tracks(trace, clocks[trace])]
    summary = {**_facts(job, max(clock.error for clock in clocks.values())), **summarized(tracks)}
    if output:
        try:
            count = write_chrome(Path(output), tracks, _facts(job, 0.0))
        except OSError as error:
            raise click.ClickException(f"{output} cannot be written: {error.strerror}") from None
        click.echo(f"{output}: {count} events of {summary['size']} ranks; open it at https://ui.perfetto.dev", err=True)
    if as_json:
        click.echo(json.dumps(summary))
    elif summarize:
        for line in (_title(summary), "", *lines(summary)):
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
    began = min(trace.epoch + trace.began for trace in job)
    return {
        "program": first.program,
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began)),
        "size": len({trace.rank for trace in job}),
        "hosts": len({(trace.host, trace.clock) for trace in job}),
        "clock_error_seconds": error if error < float("inf") else None,
    }


def _title(facts: dict[str, Any]) -> str:
    ranks, hosts = facts["size"], facts["hosts"]
    return (
        f"{facts['program'] or 'a program'}, {ranks} rank{'s' * (ranks > 1)} on {hosts} node{'s' * (hosts > 1)}, "
        f"{facts['began']}"
    )


def _faults(job: Sequence[Trace]) -> list[str]:
    faults = [f"{trace.path}: {trace.problem}" for trace in job if trace.problem]
    missing = sorted(set(range(max(trace.size for trace in job))) - {trace.rank for trace in job})
    if missing:
        faults.append(f"there is no trace of {ranks_in_words(missing)}: were they written to another directory?")
    running = sorted({trace.rank for trace in job if not trace.complete})
    if running:
        faults.append(f"the trace of {ranks_in_words(running)} does not end: a process was killed, or still runs")
    forgotten = [trace.forgotten for trace in job if trace.forgotten]
    if forgotten:
        faults.append(f"{len(forgotten)} ranks lack up to {max(forgotten)} older events: raise MPISTRAT_TRACE_BYTES")
    return faults
