"""The report of a hang: which ranks everybody waits for, why, and where all ranks are."""

from __future__ import annotations

import ast
import linecache
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mpistrat.monitor import process, stacks
from mpistrat.monitor.causes import CIRCLE, Evidence, Verdict, of_package, verdict
from mpistrat.monitor.process import ProcessFacts
from mpistrat.monitor.stacks import Frame, Stacks
from mpistrat.monitor.waits import Wait, ends_in_itself, wait_of, waits
from mpistrat.runtime.agreement.operation import ranks_in_words
from mpistrat.runtime.record import read
from mpistrat.runtime.record.read import Entry, Record

_SECOND_LOOK = 2.0  # seconds for the threads of a process that seem not to run
_MISSED, _SURELY_MISSED = 2, 4  # heartbeats: a busy machine may delay a thread
_MOST_FRAMES = 12
_MOST_PROCESSES = 4
_CHIEF_FIRST = "chief_first"  # the operation in which the others wait for the chief's block
_PLACE = re.compile(r"(.*):(\d+) in (.*)")


@dataclass(frozen=True)
class View:
    """What one process sees of the ranks of a job.

    Attributes
    ----------
    now : float
        When, by the monotonic clock of the node.
    records : tuple of Record
    facts : dict of int to ProcessFacts
        By process.
    stacks : dict of int to Stacks
        By process, of those that answer.
    holding : frozenset of int
        Processes in which no thread but the main one could run for a while.
    """

    now: float
    records: tuple[Record, ...]
    facts: dict[int, ProcessFacts]
    stacks: dict[int, Stacks]
    holding: frozenset[int]


def view(records: Sequence[Record]) -> View:
    """Look at the processes of these records: at their stacks, and at what the system says."""
    facts = {each.pid: process.look(each.pid, each.started) for each in records}
    found = stacks.ask(records)
    runs = [each for each in records if facts[each.pid].state not in "TtZX"]
    silent = {each.pid for each in runs if _is_silent(each, _SURELY_MISSED)}
    doubtful = {each.pid for each in runs if _is_silent(each, _MISSED)} - silent
    if doubtful:
        time.sleep(min(_SECOND_LOOK, 2 * max(each.beat_every for each in records)))
        records = [read.read(each.path) or each for each in records]
        silent |= {each.pid for each in records if each.pid in doubtful and _is_silent(each, _MISSED)}
    return View(time.monotonic(), tuple(records), facts, found, frozenset(silent))


def _is_silent(record: Record, beats: int) -> bool:
    return bool(record.beat_every) and time.monotonic() - record.heartbeat > beats * record.beat_every


def halted(seen: View) -> set[int]:
    """Return the processes that are stopped or gone."""
    return {process for process, facts in seen.facts.items() if facts.state in "TtZX"}


def judge(seen: View, found: Sequence[Wait]) -> dict[int, Verdict]:
    """Return the verdict on each rank that others wait for, by process."""
    verdicts = {}
    for wait in found:
        for record in wait.missing:
            own = wait_of(record, found)
            evidence = Evidence(
                record,
                seen.facts[record.pid],
                seen.stacks.get(record.pid, Stacks()),
                record.pid in seen.holding,
                own is not None and ends_in_itself(record, found),
                "" if own is None else f"in {_call(own.entry)}, for {_missing_in_words(own)}",
                own is None and _passed(record, wait, seen),
            )
            verdicts[record.pid] = verdict(evidence)
    return verdicts


def _passed(record: Record, wait: Wait, seen: View) -> bool:
    """Return whether a rank is behind the call of the others in straight-line code, without having made it.

    That is so if it is in the same function at a later line, and its last collective was an earlier line of that
    function or was made by a function around it. Otherwise it may be in a loop, on its way to the call.
    """
    if wait.entry.operation.split()[:1] == [_CHIEF_FIRST]:
        return False  # the chief runs the block before it comes to the call
    last = next((each.last for each in record.memberships if each.token == wait.token), None)
    if (0 if last is None else last.number) != wait.entry.number - 1:
        return False
    call = _frame(wait.entry.place)
    before = None if last is None else _frame(last.place)
    if call is None or (last is not None and before is None):
        return False
    stack = seen.stacks.get(record.pid, Stacks()).main
    depth = next((i for i, each in enumerate(stack) if each[::2] == call[::2]), None)
    if depth is None or stack[depth].line <= _last_line(call):
        return False
    if before is None:
        return True
    if before[::2] == call[::2]:
        return before.line < call.line
    return any(each[::2] == before[::2] for each in stack[depth + 1 :])


def _last_line(call: Frame) -> float:
    """Return the last line of the expression around a call, where its arguments end. Infinity without a source."""
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(call.file)))))
    except (SyntaxError, ValueError):
        return math.inf
    found = [each for each in nodes if isinstance(each, ast.expr)]
    ends = [each.end_lineno or each.lineno for each in found if each.lineno <= call.line]
    return max((end for end in ends if end >= call.line), default=math.inf)


def _frame(place: str) -> Frame | None:
    found = _PLACE.fullmatch(place)
    return None if found is None else Frame(found[1], int(found[2]), found[3])


def text(seen: View, found: Sequence[Wait], rank: int) -> str:
    """Return the report, which rank ``rank`` writes."""
    lines = [*causes(seen, found), "where all ranks are:", *classes(seen, found)]
    return "\n".join([f"mpistrat, rank {rank}: {lines[0]}", *lines[1:]]) + "\n"


def causes(seen: View, found: Sequence[Wait]) -> list[str]:
    """Return for each wait which ranks wait for which, and why those do not come."""
    lines = []
    verdicts = judge(seen, found)
    told: set[int] = set()
    for wait in found:
        lines += _head(wait, seen, {pid: each for pid, each in verdicts.items() if pid not in told})
        told |= {each.pid for each in wait.missing}
        if any(verdicts[each.pid].cause == CIRCLE for each in wait.missing):
            told |= {each.pid for each in wait.waiting}  # the other side of the same circle
    return lines


def _head(wait: Wait, seen: View, verdicts: dict[int, Verdict]) -> list[str]:
    waited = seen.now - wait.entry.entered
    clock = wait.waiting[0].clock
    since = time.strftime("%H:%M:%S", time.localtime(wait.entry.entered + clock))
    ranks = ranks_in_words([each.rank for each in wait.waiting])
    wait_for = f"wait{'s' if len(wait.waiting) == 1 else ''} for {_missing_in_words(wait)}"
    lines = [
        f"{ranks} of {wait.size} {wait_for} since {since}, for {waited:.0f} s",
        f"  in {_call(wait.entry)}",
    ]
    groups: dict[Verdict, list[Record]] = {}
    for record in wait.missing:
        if record.pid in verdicts:
            groups.setdefault(verdicts[record.pid], []).append(record)
    for found, records in groups.items():
        places = ", ".join(f"{each.host} process {each.pid}" for each in records[:_MOST_PROCESSES])
        more = ", ..." if len(records) > _MOST_PROCESSES else ""
        lines += [
            f"  {ranks_in_words([each.rank for each in records])} ({places}{more}): {found.what}",
            f"  cause: {found.cause}. {found.remedy}",
        ]
    if not wait.missing and not wait.unseen:
        lines.append(
            "  cause: network. All ranks are in this call and get no further: look at the links between the nodes, and "
            "at MPI itself (`mpistrat check`)."
        )
    if wait.unseen and wait.missing:
        lines.append(
            f"  {ranks_in_words(wait.unseen)} of the communicator: no record here. On another node, or without one."
        )
    elif wait.unseen:
        lines.append(
            f"  cause: on another node. No rank with a record here is missing; {ranks_in_words(wait.unseen)} of the "
            "communicator: no record here. See the reports of their nodes, or whether these are up."
        )
    return lines


def _missing_in_words(wait: Wait) -> str:
    if wait.missing:
        return ranks_in_words([each.rank for each in wait.missing])
    return "ranks without a record here" if wait.unseen else "each other"


def _call(entry: Entry) -> str:
    place = f" at {entry.place}" if entry.place else ""
    return f"{entry.operation}{place} (collective number {entry.number})"


def classes(seen: View, found: Sequence[Wait]) -> list[str]:
    """Return what each rank does and its stack, ranks with equal ones together."""
    classes: dict[tuple[str, ...], list[int]] = {}
    for record in seen.records:
        classes.setdefault(tuple(_doing(record, seen, found)), []).append(record.rank)
    lines = []
    for doing, ranks in classes.items():
        lines += [f"  {ranks_in_words(ranks)}: {doing[0]}", *doing[1:]]
    return lines


def _doing(record: Record, seen: View, found: Sequence[Wait]) -> list[str]:
    facts = seen.facts[record.pid]
    own = wait_of(record, found)
    if own is not None:
        head = f"in {_call(own.entry)}"
    else:
        last = record.entries[-1] if record.entries else None
        head = record.phase.name.lower().replace("_", " ")
        if last is not None:
            head += (
                f", {seen.now - last.left:.0f} s after {_call(last)}"
                if last.left
                else f", inside {_call(last)}"
            )
        states = {"T": "stopped", "t": "stopped", "Z": "ended", "X": "gone", "R": "running"}
        head += f"; process {record.pid} {states.get(facts.state, 'waiting')}"
        if facts.call:
            head += f" in {facts.call}()" + (f" of {facts.file}" if facts.file else "")
    lines = [head]
    known = seen.stacks.get(record.pid)
    if known is not None:
        lines += _stack(known.main)
        if own is None:
            for each in known.others:
                lines += ["    another of its threads:", *_stack(each)]
    return lines


def _stack(frames: Sequence[Frame]) -> list[str]:
    """Return a stack as lines. Of the innermost calls inside this package only the last is shown."""
    inside = next((i for i, each in enumerate(frames) if not of_package(each)), len(frames))
    shown = [*frames[:1], *frames[inside:]] if inside > 1 else list(frames)
    lines = [f"    {each.file}:{each.line} in {each.function}" for each in shown[:_MOST_FRAMES]]
    if len(shown) > _MOST_FRAMES:
        lines.append(f"    ... and {len(shown) - _MOST_FRAMES} calls around these")
    return lines


def waits_in(seen: View) -> list[Wait]:
    """Return the waits of a view."""
    return waits(seen.records, halted(seen))
