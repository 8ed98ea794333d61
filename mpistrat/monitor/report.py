"""The report of a hang: which ranks the others wait for, why, and where all ranks are."""

from __future__ import annotations

import ast
import math
import os
import re
import time
from collections.abc import Mapping, Sequence

from mpistrat.monitor import process
from mpistrat.monitor.causes import CIRCLE, Evidence, Verdict, of_package, verdict
from mpistrat.monitor.process import Links
from mpistrat.monitor.stacks import Frame, Stacks, source_lines
from mpistrat.monitor.view import JobView
from mpistrat.monitor.waits import Wait, ends_in_itself, wait_of, waits
from mpistrat.record.layout import Phase
from mpistrat.record.read import Entry, Record
from mpistrat.representation import few, grouped
from mpistrat.runtime.agreement.operation import ranks_in_words

_MOST_FRAMES = 12
_MOST_PROCESSES = 4
_NO_PROGRESS = (
    "  cause: no progress. All ranks are in this call and get no further: look whether this node has memory left, and "
    "at MPI itself (`mpistrat check`)."
)
_ENDED = "  cause: unknown. All ranks were in this call when the job ended: look at the messages of the launcher."
_CHIEF_FIRST = "chief_first"  # the operation in which the others wait for the chief's block
_PLACE = re.compile(r"(.*):(\d+) in (.*)")


def judge(seen: JobView, job_waits: Sequence[Wait]) -> dict[str, Verdict]:
    """Return the verdict on each rank that others wait for, by the key of its record."""
    verdicts = {}
    origin = [record for record in seen.records if _has_left(record, seen)]
    for wait in job_waits:
        for record in wait.missing:
            own = wait_of(record, job_waits)
            evidence = Evidence(
                record,
                seen.facts[record.key],
                seen.stacks.get(record.key, Stacks()),
                record.key in seen.holding,
                own is not None and ends_in_itself(record, job_waits),
                "" if own is None else f"in {_call(own.entry)}, for {_missing_in_words(own)}",
                own is not None and own.token == wait.token and not own.missing and not own.unseen,
                own is None and _passed(record, wait, seen),
                _ended_after(seen, origin) if record not in origin else "",
                _one_of(wait.missing) if seen.ended and not origin else (),
            )
            verdicts[record.key] = verdict(evidence)
    return verdicts


def _has_left(record: Record, seen: JobView) -> bool:
    """Return whether a rank has left its job, and not because the launcher has ended it with the others."""
    return record.phase == Phase.FAILED or record.exit_status is not None or record.rank == seen.end.first


def _ended_after(seen: JobView, origin: Sequence[Record]) -> str:
    """Return the cause for which the launcher has ended the other ranks; empty if unknown, or if the job runs."""
    if not seen.ended:
        return ""
    return ranks_in_words([record.rank for record in origin]) if origin else seen.end.by


def _one_of(records: Sequence[Record]) -> tuple[int, ...]:
    """Return the ranks of several records, the rank with the oldest sign of life first."""
    ranks = tuple(record.rank for record in sorted(records, key=lambda record: record.last_sign))
    return ranks if len(ranks) > 1 else ()


def _passed(record: Record, wait: Wait, seen: JobView) -> bool:
    """Return whether a rank is behind the call of the others in straight-line code, without having made it.

    That is so if it is in the same function at a later line, and its last collective was an earlier line of that
    function or was made by a function around it. Otherwise it may be in a loop, on its way to the call.
    """
    if wait.entry.operation.split()[:1] == [_CHIEF_FIRST]:
        return False  # the chief runs the block before it comes to the call
    last = next((membership.last for membership in record.memberships if membership.token == wait.token), None)
    if (0 if last is None else last.number) != wait.entry.number - 1:
        return False
    call = _frame(wait.entry.place)
    before = None if last is None else _frame(last.place)
    if call is None or (last is not None and before is None):
        return False
    stack = seen.stacks.get(record.key, Stacks()).main
    # [::2] is the file and the function of a frame, without its line.
    depth = next((i for i, frame in enumerate(stack) if frame[::2] == call[::2]), None)
    if depth is None or stack[depth].line <= _last_line(call):
        return False
    if before is None:
        return True
    if before[::2] == call[::2]:
        return before.line < call.line
    return any(frame[::2] == before[::2] for frame in stack[depth + 1 :])


def _last_line(call: Frame) -> float:
    """Return the last line of the expression around a call, where its arguments end. Infinity without a source."""
    try:
        nodes = list(ast.walk(ast.parse("".join(source_lines(call.file)))))
    except (SyntaxError, ValueError):
        return math.inf
    expressions = [node for node in nodes if isinstance(node, ast.expr)]
    ends = [node.end_lineno or node.lineno for node in expressions if node.lineno <= call.line]
    return max((end for end in ends if end >= call.line), default=math.inf)


def _frame(place: str) -> Frame | None:
    match = _PLACE.fullmatch(place)
    return None if match is None else Frame(match[1], int(match[2]), match[3])


def text(seen: JobView, job_waits: Sequence[Wait], rank: int) -> str:
    """Return the report, which rank ``rank`` writes."""
    lines = [*causes(seen, job_waits), "where all ranks are:", *classes(seen, job_waits)]
    return "\n".join([f"mpistrat, rank {rank}: {lines[0]}", *lines[1:]]) + "\n"


def text_outside(seen: JobView, waited: float) -> str:
    """Return the report of this rank, which waits outside of a collective. ``seen`` shows this rank only."""
    (own,) = (record for record in seen.records if record.pid == os.getpid())
    own_verdict = verdict(Evidence(own, seen.facts[own.key], seen.stacks.get(own.key, Stacks())))
    head = f"mpistrat, rank {own.rank}: has waited outside of a collective for {waited:.0f} s"
    return "\n".join([head, *_verdict_lines({own_verdict: [own]}), *classes(seen, ())]) + "\n"


def causes(seen: JobView, job_waits: Sequence[Wait]) -> list[str]:
    """Return for each wait which ranks wait for which others, and why these do not come."""
    lines = []
    verdicts = judge(seen, job_waits)
    reported: set[str] = set()
    shown = [wait for wait in job_waits if not _is_of_cut_off(wait, seen, job_waits)]
    for wait in sorted(shown, key=lambda wait: _place_in_report(wait, job_waits)):
        lines += _head(wait, seen, {key: value for key, value in verdicts.items() if key not in reported})
        reported |= {record.key for record in wait.missing}
        if any(verdicts[record.key].cause == CIRCLE for record in wait.missing):
            reported |= {record.key for record in wait.waiting}  # the other side of the same circle
    ended_first = (record for record in seen.records if record.rank == seen.end.first)
    first = next((record for record in ended_first if record.key not in reported), None)
    return lines if first is None else [*_first_to_end(first, seen), *lines]


def _first_to_end(record: Record, seen: JobView) -> list[str]:
    """Return the lines about the rank that ended first, for which no other rank waited yet."""
    own_verdict = verdict(Evidence(record, seen.facts[record.key], Stacks()))
    return [
        f"rank {record.rank} of {record.size} ended first, before other ranks waited for it",
        *_verdict_lines({own_verdict: [record]}),
    ]


def _is_of_cut_off(wait: Wait, seen: JobView, job_waits: Sequence[Wait]) -> bool:
    """Return whether the ranks of one node are alone in a call, and others wait for them in the next one."""
    nodes = process.at_fault(seen.links)
    cut_off = {rank for node in nodes for rank in node.ranks} if len(nodes) == 1 else set()
    behind = {record.key for other in job_waits for record in other.missing}
    return all(record.rank in cut_off and record.key in behind for record in wait.waiting)


def _place_in_report(wait: Wait, job_waits: Sequence[Wait]) -> int:
    """Return the sort key of a wait. In a circle the wait of most ranks comes first, and names the others."""
    in_circle = any(ends_in_itself(record, job_waits) for record in wait.missing)
    return -len(wait.waiting) if in_circle else 0


def _head(wait: Wait, seen: JobView, verdicts: dict[str, Verdict]) -> list[str]:
    waited = seen.now - wait.entry.entered
    clock = wait.waiting[0].clock
    since = time.strftime("%H:%M:%S", time.localtime(wait.entry.entered + clock))
    nodes = process.at_fault(seen.links) if not wait.missing and not wait.unseen else []
    cut_off = [rank for node in nodes for rank in node.ranks if len(nodes) == 1]
    waiting = [record.rank for record in wait.waiting if record.rank not in cut_off]
    left = [record.rank for record in wait.missing if seen.ended and _has_left(record, seen)]
    waited_for = f"{'has' if len(waiting) == 1 else 'have'} waited for {_missing_in_words(wait, cut_off or left)}"
    lines = [
        f"{ranks_in_words(waiting)} of {wait.size} {waited_for} since {since}, for {waited:.0f} s",
        f"  in {_call(wait.entry)}",
    ]
    missing = sorted(wait.missing, key=lambda record: record.rank not in left)
    lines += _verdict_lines(grouped((verdicts[record.key], record) for record in missing if record.key in verdicts))
    if not wait.missing and not wait.unseen:
        lines += _network(nodes) if len(seen.links) > 1 else [_ENDED if seen.ended else _NO_PROGRESS]
    if wait.unseen:
        lines += _unseen(wait, seen)
    return lines


def _verdict_lines(groups: Mapping[Verdict, Sequence[Record]]) -> list[str]:
    """Return the lines about ranks that do not come, one group for each verdict."""
    lines = []
    for judged, records in groups.items():
        processes = few([*map(_process, records)], _MOST_PROCESSES)
        lines += [
            f"  {ranks_in_words([record.rank for record in records])} ({processes}): {judged.observed}",
            f"  cause: {judged.cause}. {judged.remedy}",
        ]
    return lines


def _process(record: Record) -> str:
    return f"{record.host} process {record.pid}" if record.pid else record.host


def _network(nodes: Sequence[Links]) -> list[str]:
    """Return the lines about a collective that all ranks are in. ``nodes`` are the nodes whose links do not work."""
    lines = []
    for node in nodes:
        problem = f"interface {', '.join(node.dead)} has no carrier" if node.dead else "its data is not acknowledged"
        lines.append(f"  {ranks_in_words(node.ranks)} ({node.host}): {problem}")
    endpoints = f"to {' and '.join(node.host for node in nodes)}" if nodes else "between the nodes"
    return [
        *lines,
        f"  cause: network. All ranks are in this call and get no further: look at the links {endpoints}, and at MPI "
        "itself (`mpistrat check`).",
    ]


def _unseen(wait: Wait, seen: JobView) -> list[str]:
    """Return the lines about ranks without a record on this node."""
    ranks = ranks_in_words(wait.unseen)
    hosts = sorted({seen.hosts[rank] for rank in wait.unseen}) if len(seen.hosts) == wait.size else []
    on = f" ({few(hosts, _MOST_PROCESSES)})" if hosts else ""
    if wait.missing:
        return [f"  {ranks} of the communicator{on}: no record here. On another node, without one, or ended early."]
    if len(seen.links) > 1:
        return [
            f"  {ranks}{on}: no process answers, other nodes do",
            "  cause: node. That node is down or cut off, or all its processes are stopped, gone, not at their first "
            "strategy yet, or in C code that keeps the interpreter's lock: look whether it can be reached.",
        ]
    folders = ", ".join(seen.searched)
    searched = f" No other node answers: none that runs shares one of {folders}." if folders else ""
    return [
        f"  {ranks}{on}: no record here",
        "  cause: on another node. No rank with a record in this communicator is missing, unless it has not come to "
        f"its start, or has ended before it.{searched} See the reports of the other nodes, or whether these are up.",
    ]


def _missing_in_words(wait: Wait, at_fault: Sequence[int] = ()) -> str:
    if at_fault:
        return ranks_in_words(at_fault)
    if wait.missing:
        return ranks_in_words([record.rank for record in wait.missing])
    return ranks_in_words(wait.unseen) if wait.unseen else "each other"


def _call(entry: Entry) -> str:
    place = f" at {entry.place}" if entry.place else ""
    return f"{entry.operation}{place} (collective number {entry.number})"


def classes(seen: JobView, job_waits: Sequence[Wait]) -> list[str]:
    """Return the activity and the stack of each rank. Ranks with equal lines are one group."""
    lines: list[str] = []
    for doing, ranks in grouped((tuple(_doing(it, seen, job_waits)), it.rank) for it in seen.records).items():
        lines += [f"  {ranks_in_words(ranks)}: {doing[0]}", *doing[1:]]
    return lines


def _doing(record: Record, seen: JobView, job_waits: Sequence[Wait]) -> list[str]:
    facts = seen.facts[record.key]
    own = wait_of(record, job_waits)
    if own is not None:
        head = f"in {_call(own.entry)}"
    else:
        last = record.entries[-1] if record.entries else None
        head = record.phase.name.lower().replace("_", " ")
        if last is not None:
            head += f", {seen.now - last.left:.0f} s after {_call(last)}" if last.left else f", inside {_call(last)}"
        states = {"T": "stopped", "t": "stopped", "Z": "ended", "X": "gone", "R": "running"}
        process = f"process {record.pid}" if record.pid else "its process"
        head += f"; {process} {states.get(facts.state, 'waiting')}"
        if facts.call:
            head += f" in {facts.call}()" + (f" of {facts.file}" if facts.file else "")
    lines = [head]
    known = seen.stacks.get(record.key)
    if known is None and facts.state == "S" and record.path and not facts.restarts:
        lines.append("    no stack: no thread of it tells, and a signal could end what it waits for")
    if known is not None:
        lines += _stack(known.main)
        if own is None:
            for stack in known.others:
                lines += ["    another of its threads:", *_stack(stack)]
    return lines


def _stack(frames: Sequence[Frame]) -> list[str]:
    """Return a stack as lines. Of the innermost calls inside this package only the last is shown."""
    inside = next((i for i, frame in enumerate(frames) if not of_package(frame)), len(frames))
    shown = [*frames[:1], *frames[inside:]] if inside > 1 else list(frames)
    lines = [f"    {frame.file}:{frame.line} in {frame.function}" for frame in shown[:_MOST_FRAMES]]
    if len(shown) > _MOST_FRAMES:
        lines.append(f"    ... and {len(shown) - _MOST_FRAMES} calls around these")
    return lines


def waits_in(seen: JobView) -> list[Wait]:
    """Return the waits of a view."""
    return waits(seen.records, seen.halted)
