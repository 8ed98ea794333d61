"""The traces in a directory: files of ranks, which are read without trust, and the jobs that they are of."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mpistrat.cli.table import printable
from mpistrat.monitor.waits import in_jobs
from mpistrat.record import layout
from mpistrat.record.clock import Sample
from mpistrat.record.layout import Kind, Word
from mpistrat.record.read import RecordBytes

_EVENT = np.dtype(
    [
        ("kind", "u1"), ("communicator", "u1"), ("thread", "u2"), ("operation", "u4"), ("place", "u4"),
        ("unused", "u4"), ("number", "i8"), ("nbytes", "i8"), ("began", "f8"), ("met", "f8"), ("ended", "f8"),
    ]
)  # fmt: skip
_MOST_RANKS = 1_000_000
_MOST_EVENTS = 1 << 28  # of one file
_LATEST = 4e9  # seconds, by any clock: later ones are damaged
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
    right = 0 <= words[Word.RANK] < words[Word.SIZE] <= _MOST_RANKS and (times < _LATEST).all()
    if not right or not 1 <= capacity <= _MOST_EVENTS or not 0 <= written < 1 << 60:
        raise NotATraceError(f"{path} is damaged")
    there = min(capacity, (len(data) - layout.TRACE_EVENTS) // _EVENT.itemsize)
    ring = np.frombuffer(data, _EVENT, there, layout.TRACE_EVENTS)
    # The number of the last event at each place of the ring. The writer may be at the place of the oldest event.
    numbers = written - 1 - (written - 1 - np.arange(there)) % capacity
    oldest = written - capacity + 1 if written > capacity else 0
    order = np.argsort(numbers)
    kept = ring[order[numbers[order] >= oldest]]
    began, ended = kept["began"], kept["ended"]
    with np.errstate(invalid="ignore"):
        good = (began > 0) & (began < _LATEST) & (ended < _LATEST) & (kept["met"] >= 0) & (kept["met"] < _LATEST)
        good &= (kept["kind"] < len(Kind)) & ((ended == 0) | (ended >= began))
    events = kept[good]
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
    """Return the traces in a directory, and what is wrong with those of its files that are not one.

    Raise NotATraceError if the directory cannot be read.
    """
    found, problems = [], []
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise NotATraceError(f"{directory} cannot be read: {error.strerror}") from None
    for path in paths:
        if path.name.endswith(layout.SUFFIX):
            try:
                found.append(read(path))
            except NotATraceError as error:
                problems.append(str(error))
    return found, problems


def jobs(found: Iterable[Trace]) -> list[list[Trace]]:
    """Return traces in groups that share a communicator, the oldest first, each in the order of ranks."""
    groups = in_jobs(found, lambda each: (token for token, *_ in each.communicators))
    of_jobs = [sorted(group, key=lambda one: (one.rank, one.began)) for group in groups]
    return sorted(of_jobs, key=lambda job: min(one.epoch + one.began for one in job))


def aligned(job: Sequence[Trace]) -> tuple[dict[Trace, Aligned], list[str]]:
    """Return for each trace its times by the clock of the first rank, and what is wrong with them."""
    first = job[0]
    reference = next((sample.reference for each in job for sample in each.samples), first.clock)
    near = next((each for each in job if each.clock == reference), first)
    problems = []
    found: dict[int, Aligned] = {reference: Aligned(np.zeros(1), np.zeros(1), 0.0)}
    for each in job:
        if each.clock in found:
            continue
        pooled = (sample for other in job if other.clock == each.clock for sample in other.samples)
        samples = sorted(sample for sample in pooled if sample.reference == reference)
        good = [sample for sample in samples if (np.abs(sample[:3]) < _LATEST).all()]
        if good:
            at, ahead, error, _ = np.array(good, float).T
            found[each.clock] = Aligned(at, ahead, float(error.max()))
        else:
            found[each.clock] = Aligned(np.zeros(1), np.array([each.epoch - near.epoch]), float("inf"))
            problems.append(
                f"the clock of {each.host} was not compared with that of {near.host}: both are aligned by time of day"
            )
    return {each: found[each.clock] for each in job}, problems


@dataclass(frozen=True, eq=False)
class Aligned:
    """The way from the clock of a rank to that of the first rank.

    At the times ``at`` the clock of the first rank was ``ahead``. Between them the difference is a straight line.
    ``error`` is how far a time may be off, in seconds.
    """

    at: np.ndarray
    ahead: np.ndarray
    error: float

    def __call__(self, times: np.ndarray) -> np.ndarray:
        """Return times of this rank by the clock of the first rank."""
        return times + np.interp(times, self.at, self.ahead)
