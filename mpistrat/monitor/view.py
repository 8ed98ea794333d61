"""What is seen of the ranks of a job: their records, their stacks, and what the system says."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat.monitor import links, process, stacks
from mpistrat.monitor.last import UNKNOWN, End
from mpistrat.monitor.links import Links
from mpistrat.monitor.process import ProcessFacts
from mpistrat.monitor.stacks import Frame, Stacks
from mpistrat.record import read
from mpistrat.record.read import Record

_SECOND_LOOK = 2.0  # seconds for threads that seem not to run: a busy machine delays them
_POLL = 0.1  # seconds
_MISSED = 2  # heartbeats
_SAMPLES, _BETWEEN = 20, 0.01  # of processes that seem to compute, and the seconds between two


@dataclass(frozen=True)
class JobView:
    """What is seen of the ranks of a job."""

    now: float  # by the monotonic clock of a node, as all times of the records
    records: tuple[Record, ...]
    facts: dict[str, ProcessFacts]  # by the key of a record
    stacks: dict[str, Stacks]  # by the key of a record, of the processes that answer
    # keys of records of processes in which no thread but the main one could run for a while
    holding: frozenset[str]
    links: tuple[Links, ...] = ()  # of each node that was looked at
    hosts: tuple[str, ...] = ()  # the host of each rank of the job, where that is known
    # the directories in which the nodes leave notices for each other; empty where one node has all ranks
    searched: tuple[str, ...] = ()
    end: End = UNKNOWN  # that of a job that has ended

    @property
    def ranks(self) -> set[int]:
        """The ranks that have a record here."""
        return {each.rank for each in self.records}

    @property
    def halted(self) -> set[str]:
        """The keys of the records of processes that are stopped or gone."""
        return {key for key, facts in self.facts.items() if facts.state in "TtZX"}

    @property
    def ended(self) -> bool:
        """Whether all these processes have ended."""
        return all(each.state in "ZX" for each in self.facts.values())


def look(records: Sequence[Record], beat: Callable[[], object] = lambda: None) -> JobView:
    """Look at the processes of records of this node: at their stacks, and at what the system says.

    That may take seconds. ``beat`` is called now and then.
    """
    records = sorted(records, key=lambda each: (each.rank, each.pid))
    facts = {each.key: process.look(each.pid, each.started, each.path) for each in records}
    found = stacks.ask(records, beat)
    records = [read.read(each.path) or each for each in records]
    beating = [each for each in records if each.beat_every and facts[each.key].state not in "TtZX"]
    now = time.monotonic()
    silent = {each.key for each in beating if now - each.heartbeat > _MISSED * each.beat_every}
    before = {each.key: each.heartbeat for each in records}
    end = time.monotonic() + _SECOND_LOOK
    while silent and time.monotonic() < end:
        time.sleep(_POLL)
        beat()
        records = [read.read(each.path) or each for each in records]
        silent &= {each.key for each in records if each.heartbeat == before[each.key]}
    facts |= _that_sleep([each for each in records if facts[each.key].state == "R" and each.moves is False])
    own = links.look([each.rank for each in records])
    # Between two calls of C functions that take seconds each, the watchdog gets the lock for a moment.
    holding = silent | {each.key for each in records if each.kept_lock and facts[each.key].state == "R"}
    return JobView(time.monotonic(), tuple(records), facts, found, frozenset(holding), (own,))


def _that_sleep(records: Sequence[Record]) -> dict[str, ProcessFacts]:
    """Return what the system tells of those that run now and then only: a loop that sleeps between two looks, say."""
    samples: list[dict[str, ProcessFacts]] = []
    for _ in range(_SAMPLES if records else 0):
        time.sleep(_BETWEEN)
        samples.append({each.key: process.look(each.pid, each.started, each.path) for each in records})
    found = {}
    for each in records:
        idle = [sample[each.key] for sample in samples if sample[each.key].state != "R"]
        if len(idle) > len(samples) / 2:
            found[each.key] = idle[-1]
    return found


def joined(views: Sequence[JobView]) -> JobView:
    """Return the views of several nodes as one, by the clock of the first. A record that is in several counts once."""
    first = views[0]
    records: dict[str, Record] = {}
    for each in views:
        for record in each.records:
            records.setdefault(record.key, record.by_clock(first.records[0].clock))
    return dataclasses.replace(
        first,
        records=tuple(sorted(records.values(), key=lambda each: (each.rank, each.pid))),
        facts={key: facts for each in reversed(views) for key, facts in each.facts.items()},
        stacks={key: found for each in reversed(views) for key, found in each.stacks.items()},
        holding=frozenset().union(*(each.holding for each in views)),
        links=tuple(dict.fromkeys(found for each in views for found in each.links)),
    )


def as_json(view: JobView) -> dict[str, Any]:
    """Return what the other nodes need of a view, as values that JSON can hold."""
    records = [dataclasses.replace(each, steps=()) for each in view.records]
    return {
        "now": view.now,
        "records": [read.record_as_json(each, 1) for each in records],
        "facts": {key: dataclasses.asdict(each) for key, each in view.facts.items()},
        "stacks": view.stacks,
        "holding": sorted(view.holding),
        "links": view.links,
    }


def from_json(told: dict[str, Any]) -> JobView:
    """Return the view of values that `as_json` made.

    Raise KeyError, TypeError or ValueError if the values are of another version of the package, or damaged.
    """
    return JobView(
        told["now"],
        tuple(map(read.record_from_json, told["records"])),
        {key: ProcessFacts(**each) for key, each in told["facts"].items()},
        {key: Stacks(_stack(main), tuple(map(_stack, others))) for key, (main, others) in told["stacks"].items()},
        frozenset(told["holding"]),
        tuple(Links(host, *map(tuple, others)) for host, *others in told["links"]),
    )


def _stack(frames: Sequence[Sequence[Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(*each) for each in frames)
