"""The traces in a directory: the files of the ranks, which may be damaged, and the spans of each rank in time."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpistrat.cli.table import printable
from mpistrat.monitor.waits import in_jobs
from mpistrat.record import layout
from mpistrat.record.layout import NO_COMMUNICATOR, Kind, Word
from mpistrat.record.read import RecordBytes
from mpistrat.record.ring import Sample

# `layout.EVENT`, whose padding is a field here: NumPy reads all events at once.
_EVENT = np.dtype(
    [
        ("kind", "u1"), ("communicator", "u1"), ("thread", "u2"), ("operation", "u4"), ("place", "u4"),
        ("unused", "u4"), ("number", "i8"), ("nbytes", "i8"), ("began", "f8"), ("met", "f8"), ("ended", "f8"),
    ]
)  # fmt: skip
_MOST_RANKS = 1_000_000
_MOST_EVENTS = 1 << 28  # of one file
_LATEST = 4e9  # seconds, by any clock: later ones are damaged
USER, MEET, WIRE = "USER", "REDUCE_MEET", "REDUCE_WIRE"
_DEEPEST = 20  # events inside each other
PHASES = ("INPUT_WAIT", "REDUCE_PACK", MEET, WIRE, "REDUCE_UNPACK", "SAVE", USER)


assert _EVENT.itemsize == layout.EVENT.size


class NotATraceError(ValueError):
    """A file that is not a trace, or cannot be read."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The trace of one rank. Times are by the monotonic clock of the rank.

    ``clock`` is a number that is equal for ranks with the same clock, and ``epoch`` what to add to that clock for the
    time since the epoch. The trace lasts from ``began`` to ``last``. It is ``complete`` if it ended: else the process
    was killed, or still runs. ``communicators`` has the random number, the size and this rank of each.

    ``events`` are in the order in which they began, and ``forgotten`` is the number of those that had no more room in
    the file. ``problem`` says what is wrong with the file, empty if nothing is.
    """

    path: Path
    rank: int
    size: int
    pid: int
    host: str
    program: str
    clock: int
    epoch: float
    began: float
    last: float
    complete: bool
    communicators: tuple[tuple[int, int, int], ...]
    samples: tuple[Sample, ...]
    events: np.ndarray = field(repr=False)
    forgotten: int
    problem: str
    _contents: RecordBytes = field(repr=False)

    def text(self, number: int) -> str:
        """Return a text of this trace, empty if it has none of this number."""
        return printable(self._contents.text(number))


def read(path: Path) -> Trace:
    """Return the trace in a file. Raise NotATraceError if it cannot be read or is not a trace."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise NotATraceError(f"{path} is not a file")
            data = file.read()
    except OSError as error:
        raise NotATraceError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) < layout.TRACE_EVENTS:
        raise NotATraceError(f"{path} is not a trace, or was cut before its first event")
    return _parsed(path, data)


def _parsed(path: Path, data: bytes) -> Trace:
    contents = RecordBytes(data[: layout.TRACE_EVENTS], layout.TRACE_TEXTS)
    words, seconds = contents.words, contents.seconds
    if not contents.is_valid:
        raise NotATraceError(f"{path} is not a trace")
    if not contents.is_of_this_version:
        raise NotATraceError(f"{path} was written by another version of mpistrat")
    capacity, written = words[Word.CAPACITY], words[Word.EVENTS]
    times = np.abs([seconds[Word.EPOCH], seconds[Word.BEGAN], seconds[Word.ENDED]])
    valid = 0 <= words[Word.RANK] < words[Word.SIZE] <= _MOST_RANKS and (times < _LATEST).all()
    if not valid or not 1 <= capacity <= _MOST_EVENTS or not 0 <= written < 1 << 60:
        raise NotATraceError(f"{path} is damaged")
    count = min(capacity, (len(data) - layout.TRACE_EVENTS) // _EVENT.itemsize)
    ring = np.frombuffer(data, _EVENT, count, layout.TRACE_EVENTS)
    # The number of the last event at each place of the ring. The writer may be at the place of the oldest event.
    numbers = written - 1 - (written - 1 - np.arange(count)) % capacity
    oldest = written - capacity + 1 if written > capacity else 0
    order = np.argsort(numbers)
    rows = ring[order[numbers[order] >= oldest]]
    began, ended = rows["began"], rows["ended"]
    with np.errstate(invalid="ignore"):
        good = (began > 0) & (began < _LATEST) & (ended < _LATEST) & (rows["met"] >= 0) & (rows["met"] < _LATEST)
        good &= (rows["kind"] < len(Kind)) & ((ended == 0) | (ended >= began))
    events = rows[good]
    events = events[np.argsort(events["began"], kind="stable")]
    bad = written - oldest - len(events)
    ends = [seconds[Word.BEGAN], *(float(events[name].max()) for name in ("began", "met", "ended") if len(events))]
    complete = seconds[Word.ENDED] > 0
    return Trace(
        path=path,
        rank=words[Word.RANK],
        size=words[Word.SIZE],
        pid=words[Word.PID],
        host=printable(contents.header_text(layout.HOST)),
        program=printable(contents.header_text(layout.PROGRAM)),
        clock=words[Word.CLOCK],
        epoch=seconds[Word.EPOCH],
        began=seconds[Word.BEGAN] if written <= capacity else float(events["began"][0]) if len(events) else ends[0],
        last=max(seconds[Word.ENDED], *ends),
        complete=complete,
        communicators=tuple(
            contents.communicator(i)[:3]
            for i in range(min(max(0, words[Word.COMMUNICATORS]), layout.MOST_COMMUNICATORS))
        ),
        samples=tuple(
            Sample(*layout.SAMPLE.unpack_from(data, layout.SAMPLES + i * layout.SAMPLE.size))
            for i in range(min(max(0, words[Word.SAMPLES]), layout.MOST_SAMPLES))
        ),
        events=events,
        forgotten=max(0, written - capacity),
        problem=f"{bad} of its events are missing or damaged: was the file cut?" if bad else "",
        _contents=contents,
    )


def traces(directory: Path) -> tuple[list[Trace], list[str]]:
    """Return the traces in a directory, and the error of each trace file that cannot be read.

    Raise NotATraceError if the directory cannot be read.
    """
    result, problems = [], []
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise NotATraceError(f"{directory} cannot be read: {error.strerror}") from None
    for path in paths:
        if path.name.endswith(layout.SUFFIX):
            try:
                result.append(read(path))
            except NotATraceError as error:
                problems.append(str(error))
    return result, problems


def jobs(all_traces: Iterable[Trace]) -> list[list[Trace]]:
    """Return traces in groups that share a communicator, the oldest first, each in the order of ranks."""
    groups = in_jobs(all_traces, lambda trace: (token for token, *_ in trace.communicators))
    of_jobs = [sorted(group, key=lambda trace: (trace.rank, trace.began)) for group in groups]
    return sorted(of_jobs, key=lambda job: min(trace.epoch + trace.began for trace in job))


def aligned(job: Sequence[Trace]) -> tuple[dict[Trace, ClockMap], list[str]]:
    """Return the function from each trace's clock to the first rank's, and the problems of these functions."""
    first = job[0]
    reference = next((sample.reference for trace in job for sample in trace.samples), first.clock)
    near = next((trace for trace in job if trace.clock == reference), first)
    problems = []
    by_clock: dict[int, ClockMap] = {reference: ClockMap(np.zeros(1), np.zeros(1), 0.0)}
    for trace in job:
        if trace.clock in by_clock:
            continue
        pooled = (sample for other in job if other.clock == trace.clock for sample in other.samples)
        samples = sorted(sample for sample in pooled if sample.reference == reference)
        good = [sample for sample in samples if (np.abs(sample[:3]) < _LATEST).all()]
        if good:
            at, ahead, error, _ = np.array(good, float).T
            by_clock[trace.clock] = ClockMap(at, ahead, float(error.max()))
        else:
            by_clock[trace.clock] = ClockMap(np.zeros(1), np.array([trace.epoch - near.epoch]), float("inf"))
            problems.append(
                f"the clock of {trace.host} was not compared with that of {near.host}: both are aligned by time of day"
            )
    return {trace: by_clock[trace.clock] for trace in job}, problems


@dataclass(frozen=True, eq=False)
class ClockMap:
    """The function from times of one rank's clock to times of the first rank's clock.

    At the times ``at`` the clock of the first rank was ``ahead``. Between them the difference is a straight line.
    ``error`` is how far a time may be off, in seconds.
    """

    at: np.ndarray
    ahead: np.ndarray
    error: float

    def __call__(self, times: np.ndarray) -> np.ndarray:
        """Return times of this rank by the clock of the first rank."""
        return times + np.interp(times, self.at, self.ahead)


class Call(NamedTuple):
    """A collective of one rank.

    ``communicator`` is the random number of the communicator, which counts its collectives by ``number``. ``finished``
    tells whether this rank has left the collective.
    """

    operation: str
    place: str
    communicator: int
    size: int
    number: int
    nbytes: int
    finished: bool


class Span(NamedTuple):
    """What a rank did for some time. Times are in whole nanoseconds, by the clock of the first rank.

    ``name`` is the name of a phase, or of the collective ``call``. ``own`` is the time without the spans inside it.
    """

    name: str
    begin: int
    end: int
    own: int
    call: Call | None = None


class Track(NamedTuple):
    """What one thread of a rank did. The main thread is 0.

    ``host`` is the name and the clock of the host. ``spans`` are in the order of their beginnings, an outer one before
    those inside it, and ``steps`` are the times at which steps ended.
    """

    rank: int
    thread: int
    host: tuple[str, int]
    spans: list[Span]
    steps: list[int]


class _Event:
    """An event, and the events inside it."""

    __slots__ = ("begin", "call", "end", "inside", "kind", "met")

    def __init__(self, kind: int, begin: int, end: int, met: int, call: Call | None):
        self.kind, self.begin, self.end, self.met, self.call = kind, begin, end, met, call
        self.inside: list[_Event] = []


def tracks(trace: Trace, clock: ClockMap) -> list[Track]:
    """Return the tracks of a rank's threads, the main thread first."""
    events = trace.events
    last = int(clock(np.array([trace.last]))[0] * 1e9)
    first = int(clock(np.array([trace.began]))[0] * 1e9)
    result = []
    for thread in sorted({0, *np.unique(events["thread"]).tolist()}):
        of_thread = events[events["thread"] == thread]
        is_step = of_thread["kind"] == Kind.STEP
        steps = (clock(of_thread[is_step]["began"]) * 1e9).astype(np.int64).tolist()
        root = _Event(-1, first, last, 0, None)
        root.inside = _nested(trace, clock, of_thread[~is_step], last)
        if root.inside:
            root.begin = min(first, root.inside[0].begin)
        spans: list[Span] = []
        _unfold(root, spans, USER if thread == 0 else "")
        result.append(Track(trace.rank, thread, (trace.host, trace.clock), spans, steps))
    return result


def _nested(trace: Trace, clock: ClockMap, events: np.ndarray, last: int) -> list[_Event]:
    """Return events in a tree. An event that would end after the one around it is cut to end with it."""
    top: list[_Event] = []
    around: list[_Event] = []
    begins = (clock(events["began"]) * 1e9).astype(np.int64)
    ends = (clock(events["ended"]) * 1e9).astype(np.int64)
    for kind in Kind:  # one that did not end has ended by the next one of its kind
        (rows,) = np.nonzero(events["kind"] == kind)
        ends[rows] = np.where(events["ended"][rows] > 0, ends[rows], [*begins[rows[1:]], last][: len(rows)])
    mets = np.where(events["met"] > 0, (clock(events["met"]) * 1e9).astype(np.int64), 0)
    order = np.lexsort((-ends, begins))
    texts: dict[int, str] = {}
    for i in order.tolist():
        event = events[i]
        call = _call(trace, event, texts) if event["kind"] == Kind.COLLECTIVE else None
        begin, end = int(begins[i]), int(ends[i])
        while around and around[-1].end <= begin:
            around.pop()
        if len(around) == _DEEPEST:
            continue  # a damaged file
        if around:
            end = min(end, around[-1].end)
        nested = _Event(int(event["kind"]), begin, end, int(mets[i]), call)
        (around[-1].inside if around else top).append(nested)
        around.append(nested)
    return top


def _call(trace: Trace, event: np.void, texts: dict[int, str]) -> Call:
    operation, place, communicator = int(event["operation"]), int(event["place"]), int(event["communicator"])
    for number in (operation, place):
        if number not in texts:
            texts[number] = trace.text(number)
    token, size = 0, 0
    if communicator != NO_COMMUNICATOR and communicator < len(trace.communicators):
        token, size, _ = trace.communicators[communicator]
    return Call(
        texts[operation] or "collective", texts[place], token, size, int(event["number"]), int(event["nbytes"]),
        bool(event["ended"] > 0),
    )  # fmt: skip


def _unfold(event: _Event, spans: list[Span], rest: str) -> None:
    """Add the spans of the events inside an event, and between them spans of the name ``rest``."""
    at = event.begin
    for inner in event.inside:
        _fill(event, at, inner.begin, spans, rest)
        index = len(spans)
        spans.append(Span("", inner.begin, inner.end, 0, inner.call))
        if inner.call is not None:
            _unfold(inner, spans, WIRE)
            spans[index] = Span(inner.call.operation, inner.begin, inner.end, 0, inner.call)
        else:
            _unfold(inner, spans, "")
            inside = sum(child.end - child.begin for child in inner.inside)
            spans[index] = Span(Kind(inner.kind).name, inner.begin, inner.end, inner.end - inner.begin - inside)
        at = inner.end
    _fill(event, at, event.end, spans, rest)


def _fill(event: _Event, begin: int, end: int, spans: list[Span], rest: str) -> None:
    """Add a span between two others. A rank that has not met the others in a collective waits for them."""
    if not rest or end <= begin:
        return
    if event.call is not None and event.call.size > 1:
        met = event.met or event.end
        if met > begin:
            until = min(met, end)
            spans.append(Span(MEET, begin, until, until - begin))
            begin = until
    if end > begin:
        spans.append(Span(rest, begin, end, end - begin))


def shares(spans: Sequence[Span]) -> dict[str, int]:
    """Return the nanoseconds of each phase. Inside a phase the innermost one counts."""
    totals = dict.fromkeys(PHASES, 0)
    for span in spans:
        if span.own:
            totals[span.name] += span.own
    return totals
