"""What a rank did from when to when: phases with fixed names, which do not overlap, inside calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpistrat.cli.trace.files import Aligned, Trace
from mpistrat.record.layout import NO_COMMUNICATOR, Kind

USER, MEET, WIRE = "USER", "REDUCE_MEET", "REDUCE_WIRE"
_DEEPEST = 20  # events inside each other
PHASES = ("INPUT_WAIT", "REDUCE_PACK", MEET, WIRE, "REDUCE_UNPACK", "SAVE", USER)


class Call(NamedTuple):
    """A collective of one rank.

    ``communicator`` is the random number of the communicator, and ``number`` that of the collective in it. ``finished``
    tells whether this rank has left it.
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

    ``name`` is a phase, or that of the collective ``call``. ``own`` is the time that is not of a span inside this one.
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
    """An event, and those inside it."""

    __slots__ = ("begin", "call", "end", "inside", "kind", "met")

    def __init__(self, kind: int, begin: int, end: int, met: int, call: Call | None):
        self.kind, self.begin, self.end, self.met, self.call = kind, begin, end, met, call
        self.inside: list[_Event] = []


def tracks(trace: Trace, clock: Aligned) -> list[Track]:
    """Return what the threads of a rank did, the main thread first."""
    events = trace.events
    last = int(clock(np.array([trace.last]))[0] * 1e9)
    first = int(clock(np.array([trace.began]))[0] * 1e9)
    found = []
    for thread in sorted({0, *np.unique(events["thread"]).tolist()}):
        mine = events[events["thread"] == thread]
        is_step = mine["kind"] == Kind.STEP
        steps = (clock(mine[is_step]["began"]) * 1e9).astype(np.int64).tolist()
        root = _Event(-1, first, last, 0, None)
        root.inside = _nested(trace, clock, mine[~is_step], last)
        if root.inside:
            root.begin = min(first, root.inside[0].begin)
        spans: list[Span] = []
        _unfold(root, spans, USER if thread == 0 else "")
        found.append(Track(trace.rank, thread, (trace.host, trace.clock), spans, steps))
    return found


def _nested(trace: Trace, clock: Aligned, events: np.ndarray, last: int) -> list[_Event]:
    """Return events in a tree. One that would end after the event around it ends with that."""
    top: list[_Event] = []
    around: list[_Event] = []
    begins = (clock(events["began"]) * 1e9).astype(np.int64)
    ends = (clock(events["ended"]) * 1e9).astype(np.int64)
    for kind in Kind:  # one that did not end has ended by the next one of its kind
        (own,) = np.nonzero(events["kind"] == kind)
        ends[own] = np.where(events["ended"][own] > 0, ends[own], [*begins[own[1:]], last][: len(own)])
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
        one = _Event(int(event["kind"]), begin, end, int(mets[i]), call)
        (around[-1].inside if around else top).append(one)
        around.append(one)
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
    for each in event.inside:
        _fill(event, at, each.begin, spans, rest)
        index = len(spans)
        spans.append(Span("", each.begin, each.end, 0, each.call))
        if each.call is not None:
            _unfold(each, spans, WIRE)
            spans[index] = Span(each.call.operation, each.begin, each.end, 0, each.call)
        else:
            _unfold(each, spans, "")
            inside = sum(one.end - one.begin for one in each.inside)
            spans[index] = Span(Kind(each.kind).name, each.begin, each.end, each.end - each.begin - inside)
        at = each.end
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
    found = dict.fromkeys(PHASES, 0)
    for each in spans:
        if each.own:
            found[each.name] += each.own
    return found
