"""A view of the ranks of a job, on this node and others: records, stacks, and facts from the system.

Watchdogs of several nodes tell each other what they see by notices on a board, since they never call MPI. The lowest
rank of each node that waits too long *asks*: it posts what its node sees. The other nodes see that and *say* what they
see. A node that *looks* at its processes gives signs of life meanwhile: that takes seconds, on a busy machine many. The
lowest rank that asks collects it all. It waits for a node for as long as that gives signs.

Another job may have the same key, such as in containers whose processes have equal numbers. Only what shares a
communicator with this job counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpistrat.monitor import process, stacks
from mpistrat.monitor.last import UNKNOWN, End
from mpistrat.monitor.process import Links, ProcessFacts
from mpistrat.monitor.stacks import Frame, Stacks
from mpistrat.monitor.waits import in_jobs, tokens_of
from mpistrat.record import read
from mpistrat.record.read import Record
from mpistrat.runtime.environment import rc
from mpistrat.runtime.without_mpi.board import SharedDirectory

_SECOND_LOOK = 2.0  # seconds for threads that seem not to run: a busy machine delays them
_MISSED = 2  # heartbeats
_SAMPLES, _BETWEEN = 20, 0.01  # of processes that seem to compute, and the seconds between two
_ASKS, _SAYS, _LOOKS, _COLLECTS, _LEFT = "asks", "says", "looks", "collects", "left"
_NAME = re.compile(r".+\.[a-z]+\.\d+")  # the call, what is said, and the rank
_POLL = 0.1  # seconds between two looks for answers
_SIGN = 1.0  # seconds between two signs of life, or two changes of the directory


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
    end: End = UNKNOWN  # how the job has ended

    @property
    def ranks(self) -> set[int]:
        """The ranks that have a record here."""
        return {record.rank for record in self.records}

    @property
    def halted(self) -> set[str]:
        """The keys of the records of processes that are stopped or gone."""
        return {key for key, facts in self.facts.items() if facts.state in "TtZX"}

    @property
    def ended(self) -> bool:
        """Whether all these processes have ended."""
        return all(facts.state in "ZX" for facts in self.facts.values())


def look(records: Sequence[Record], beat: Callable[[], object] = lambda: None) -> JobView:
    """Look at the stacks and the system's facts of processes of this node, given their records.

    That may take seconds. ``beat`` is called now and then.
    """
    records = sorted(records, key=lambda record: (record.rank, record.pid))
    facts = {record.key: process.look(record.pid, record.started, record.path) for record in records}
    answers = stacks.ask(records, beat)
    records = [read.read(record.path) or record for record in records]
    beating = [record for record in records if record.beat_every and facts[record.key].state not in "TtZX"]
    now = time.monotonic()
    silent = {record.key for record in beating if now - record.heartbeat > _MISSED * record.beat_every}
    before = {record.key: record.heartbeat for record in records}
    end = time.monotonic() + _SECOND_LOOK
    while silent and time.monotonic() < end:
        time.sleep(_POLL)
        beat()
        records = [read.read(record.path) or record for record in records]
        silent &= {record.key for record in records if record.heartbeat == before[record.key]}
    facts |= _sleeping([record for record in records if facts[record.key].state == "R" and record.moves is False])
    own = process.look_at_links([record.rank for record in records])
    # Between two calls of C functions that take seconds each, the watchdog gets the lock for a moment.
    holding = silent | {record.key for record in records if record.kept_lock and facts[record.key].state == "R"}
    return JobView(time.monotonic(), tuple(records), facts, answers, frozenset(holding), (own,))


def _sleeping(records: Sequence[Record]) -> dict[str, ProcessFacts]:
    """Return the facts of processes that sleep in most of several samples, as a loop does that polls."""
    samples: list[dict[str, ProcessFacts]] = []
    for _ in range(_SAMPLES if records else 0):
        time.sleep(_BETWEEN)
        samples.append({record.key: process.look(record.pid, record.started, record.path) for record in records})
    asleep = {}
    for record in records:
        idle = [sample[record.key] for sample in samples if sample[record.key].state != "R"]
        if len(idle) > len(samples) / 2:
            asleep[record.key] = idle[-1]
    return asleep


def joined(views: Sequence[JobView]) -> JobView:
    """Return the views of several nodes as one, by the clock of the first. A record that is in several counts once."""
    first = views[0]
    records: dict[str, Record] = {}
    for view in views:
        for record in view.records:
            records.setdefault(record.key, record.by_clock(first.records[0].clock))
    return dataclasses.replace(
        first,
        records=tuple(sorted(records.values(), key=lambda record: (record.rank, record.pid))),
        facts={key: facts for view in reversed(views) for key, facts in view.facts.items()},
        stacks={key: stack for view in reversed(views) for key, stack in view.stacks.items()},
        holding=frozenset().union(*(view.holding for view in views)),
        links=tuple(dict.fromkeys(links for view in views for links in view.links)),
    )


def as_json(view: JobView) -> dict[str, Any]:
    """Return the parts of a view that other nodes need, as values that JSON can hold."""
    records = [dataclasses.replace(record, steps=()) for record in view.records]
    return {
        "now": view.now,
        "records": [read.record_as_json(record, 1) for record in records],
        "facts": {key: dataclasses.asdict(facts) for key, facts in view.facts.items()},
        "stacks": view.stacks,
        "holding": sorted(view.holding),
        "links": view.links,
    }


def from_json(values: dict[str, Any]) -> JobView:
    """Return the view of values that `as_json` made.

    Raise KeyError, TypeError or ValueError if the values are of another version of the package, or damaged.
    """
    return JobView(
        values["now"],
        tuple(map(read.record_from_json, values["records"])),
        {key: ProcessFacts(**facts) for key, facts in values["facts"].items()},
        {key: Stacks(_stack(main), tuple(map(_stack, others))) for key, (main, others) in values["stacks"].items()},
        frozenset(values["holding"]),
        tuple(Links(host, *map(tuple, others)) for host, *others in values["links"]),
    )


def _stack(frames: Sequence[Sequence[Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(*frame) for frame in frames)


class Notices:
    """The notices that ranks of different nodes post for each other.

    ``key`` and ``delay`` are as of `SharedDirectory`. ``searched`` has the directories in which notices lie.
    """

    def __init__(self, key: str, rank: int):
        self._board = SharedDirectory(key, (Path(rc.record_dir),) if rc.record_dir else ())
        self._rank = rank
        self._posted: set[str] = set()
        self._changes = threading.Lock()  # the main thread ends while the watchdog posts
        self._ended = False
        self.searched, self.delay = self._board.folders, self._board.delay

    def looking(self) -> AbstractContextManager[Callable[[], None]]:
        """Return a context in which this node looks at its processes, until it has asked or said.

        Its value is a function that gives a sign of life, to be called now and then.
        """
        return self._repeating(f"{_LOOKS}.{_LOOKS}.{self._rank}")

    def ask(self, call: str, seen: JobView) -> None:
        """Post the view of this node, and ask the other nodes. ``call`` names the collective that waits."""
        self._post(f"{call}.{_ASKS}.{self._rank}", as_json(seen))

    def any(self) -> bool:
        """Return whether any node has posted a notice."""
        return bool(self._names())

    def unanswered(self, node: Sequence[int]) -> list[str]:
        """Return the calls that other nodes ask about and that no rank of this node, ``node``, has answered."""
        asked, answered = set(), set()
        for name in self._names():
            call, kind, rank = _parsed_name(name)
            if rank in node:
                answered.add(call)
            elif kind == _ASKS:
                asked.add(call)
        return sorted(asked - answered)

    def say(self, call: str, seen: JobView) -> None:
        """Post the view of this node, for another node that asks."""
        self._post(f"{call}.{_SAYS}.{self._rank}", as_json(seen))

    def announce_exit(self, seen: JobView) -> None:
        """Post the view of this rank, which is about to end: perhaps no process of its node is left to answer."""
        self._board.post(f"{_LEFT}.{_SAYS}.{self._rank}", as_json(seen))

    def collects(self, own: JobView) -> bool:
        """Return whether no lower rank asks. ``own`` is the view of this node."""
        names = [name for name in self._names() if _parsed_name(name)[1] == _ASKS]
        lower = [view for name in names if _parsed_name(name)[2] < self._rank and (view := self._view(name))]
        return len(_of_one_job(own, lower)) == 1

    def collect(self, call: str, own: JobView, size: int, patience: float, waits: Callable[[], bool]) -> JobView:
        """Return the views of all nodes as one, when it has all ``size`` ranks or the others give no sign of life.

        ``own`` is the view of this node. Ranks that are not seen yet have ``patience`` seconds for a sign of life. Ends
        at once where ``waits()``, which is called now and then, tells that this rank waits no longer, or where a lower
        rank asks, which collects then.
        """
        views: dict[str, JobView] = {}
        job = [own]
        signs: dict[str, Any] = {}
        latest = time.monotonic()
        with self._repeating(f"{_COLLECTS}.{_COLLECTS}.{self._rank}") as change:
            while (
                len(ranks := set().union(*(view.ranks for view in job))) < size
                and time.monotonic() - latest < patience
                and self.collects(own)
                and waits()
            ):
                time.sleep(_POLL)
                change()  # NFS looks at a directory again after a change that is made here
                names = {name: _parsed_name(name) for name in self._names()}
                last = signs
                signs = {
                    name: self._board.read(name)
                    for name, (_, kind, rank) in names.items()
                    if kind == _LOOKS and rank not in ranks
                }
                if signs != last:
                    latest = time.monotonic()
                for name in sorted(names.keys() - views.keys()):
                    about, _, rank = names[name]
                    if about in (call, _LEFT) and rank != self._rank and (seen := self._view(name)) is not None:
                        views[name] = seen
                job = _of_one_job(own, views.values())
        return joined(job)

    def claim(self, call: str) -> bool:
        """Return whether this rank is the first that reports on a call."""
        return self._board.claim(call)

    def take_down(self) -> None:
        """Remove the notices of this rank, which are not true any more."""
        self._take_down(set(self._posted))

    def leave(self) -> None:
        """Remove the notices of this rank, and post no others: the program ends."""
        with self._changes:
            self._ended = True
        self._board.take_down(self._posted, lambda name: name.startswith(f"{_LEFT}."))

    def remove(self) -> None:
        """Remove the notices of all ranks: the job ends."""
        with self._changes:
            self._ended = True
        self._board.take_down(self._posted, lambda name: True)

    @contextlib.contextmanager
    def _repeating(self, name: str) -> Iterator[Callable[[], None]]:
        """Context in which a notice is posted. Yields a function that posts it again when a second has passed."""
        last = -math.inf

        def repeat() -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= _SIGN:
                self._post(name, now)
                last = now

        repeat()
        try:
            yield repeat
        finally:
            self._take_down({name})

    def _post(self, name: str, value: Any) -> None:
        with self._changes:
            if not self._ended:
                self._board.post(name, value)
                self._posted.add(name)

    def _take_down(self, names: set[str]) -> None:
        with self._changes:
            self._board.take_down(names)
            self._posted -= names

    def _names(self) -> set[str]:
        """Return the names of the notices, without other files."""
        return {name for name in self._board.names() if _NAME.fullmatch(name)}

    def _view(self, name: str) -> JobView | None:
        # Removed, of another version, or damaged.
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            return from_json(self._board.read(name))
        return None


def _of_one_job(own: JobView, others: Iterable[JobView]) -> list[JobView]:
    """Return a view, and the others that share a communicator with it, directly or through others."""

    def tokens(seen: JobView) -> set[int]:
        return set().union(*map(tokens_of, seen.records))

    (job,) = (job for job in in_jobs([own, *others], tokens) if own in job)
    return [own, *(view for view in job if view is not own)]


def _parsed_name(name: str) -> tuple[str, str, int]:
    call, kind, rank = name.rsplit(".", 2)
    return call, kind, int(rank)
