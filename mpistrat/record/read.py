"""Flight records as other processes of the same user read them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import struct
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mpistrat.launch import proc
from mpistrat.record import layout
from mpistrat.record.layout import Phase, Word


@dataclass(frozen=True)
class Entry:
    """One collective in which a rank is or was."""

    # the random number of the communicator, and the number of the collective in it
    communicator: int
    number: int
    # what it is, and the line of the program that called it, as ``file:line in function``
    operation: str
    place: str
    nbytes: int
    # times by the monotonic clock of the node; 0 if that has not come yet
    entered: float
    met: float
    left: float


@dataclass(frozen=True)
class Membership:
    """A communicator of a rank: its random number, its size, this rank in it, and its last collective."""

    token: int
    size: int
    rank: int
    last: Entry | None


@dataclass(frozen=True)
class Record:
    """The flight record of one process, at one time. Times are by the monotonic clock of the node."""

    pid: int
    rank: int
    size: int
    started: int = 0
    path: str = ""
    main_thread: int = 0
    signal: int = 0
    host: str = ""
    launch: str = ""  # equal for the ranks of a node that were started together; empty if there is one rank
    job: str = ""
    program: str = ""
    note: str = ""
    phase: Phase = Phase.USER_CODE
    phase_since: float = 0.0
    heartbeat: float = 0.0
    beat_every: float = 0.0
    clock: float = 0.0
    step: int = 0  # the number of steps
    step_since: float = 0.0
    bytes: int = 0  # that collectives were given
    # whether the main thread ran Python code when this was last looked at; None if it was not
    moves: bool | None = None
    exit_status: int | None = None  # the status that was given to `os._exit`
    out_of_memory_kills: int | None = None  # in its cgroup, when the record was made
    memberships: tuple[Membership, ...] = ()
    # of the last steps, the oldest first: seconds in all, in collectives, in input, in saving
    steps: tuple[tuple[float, float, float, float], ...] = field(default=(), repr=False)
    entries: tuple[Entry, ...] = field(default=(), repr=False)  # the last collectives, the oldest first
    # whether the main thread let the watchdog wait for the interpreter's lock before its last heartbeat
    kept_lock: bool = False

    @property
    def key(self) -> str:
        """A text that no other process of the job has, also on other nodes."""
        return self.path or f"{self.host} {self.pid}"

    def by_clock(self, clock: float) -> Record:
        """Return the record with its times by the monotonic clock of another node, given that node's `clock`."""
        shift = self.clock - clock

        def shifted(entry: Entry) -> Entry:
            times = {name: getattr(entry, name) for name in ("entered", "met", "left")}
            # 0 stays 0: it stands for what has not come yet.
            return replace(entry, **{name: moment and moment + shift for name, moment in times.items()})

        return replace(
            self,
            clock=clock,
            phase_since=self.phase_since + shift,
            heartbeat=self.heartbeat + shift,
            step_since=self.step_since + shift,
            memberships=tuple(replace(one, last=one.last and shifted(one.last)) for one in self.memberships),
            entries=tuple(map(shifted, self.entries)),
        )

    @property
    def lives(self) -> bool:
        """Whether the process of this record exists. A process that ended and was not waited for does not count."""
        return proc.started(self.pid) == self.started and proc.state(self.pid) not in "ZX"

    @property
    def watches(self) -> bool:
        """Whether the watchdog of this process runs, which must be one of this node."""
        return self.lives and time.monotonic() - self.heartbeat <= 2 * self.beat_every

    @property
    def last_sign(self) -> float:
        """When this process last wrote to its record, in seconds since the epoch."""
        last = [moment for entry in self.entries[-1:] for moment in (entry.entered, entry.met, entry.left)]
        return self.clock + max(self.heartbeat, self.phase_since, self.step_since, *last)

    @property
    def waits(self) -> tuple[Membership, ...]:
        """The communicators in whose collectives this rank is, the oldest wait first."""
        inside = [member for member in self.memberships if member.last is not None and not member.last.left]
        return tuple(sorted(inside, key=lambda member: member.last.entered if member.last else 0.0))


def records(folder: str = layout.FOLDER) -> list[Record]:
    """Return the records of this user's processes on this node, in the order of ranks."""
    paths = []
    with contextlib.suppress(OSError):
        paths = [entry.path for entry in os.scandir(folder) if entry.name.startswith(layout.PREFIX)]
    return sorted(filter(None, map(read, paths)), key=lambda record: (record.rank, record.pid))


def read(path: str | Path) -> Record | None:
    """Return the record in a file, or None if the file is not a record of this user that is complete."""
    try:
        # O_NONBLOCK: another user's pipe of this name would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                return None
            data = os.pread(descriptor, layout.STACKS, 0)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return parse(data, str(path))


def parse(data: bytes, path: str = "") -> Record | None:
    """Return the record that a file or memory holds, or None if it does not hold a complete one."""
    if len(data) < layout.STACKS:
        return None
    contents = RecordBytes(data, layout.RECORD_TEXTS)
    if not (contents.is_valid and contents.is_of_this_version):
        return None
    try:
        return _record(contents, path)
    except ValueError:  # a phase or a text that does not exist: damaged
        return None


def remove_old(seconds: float, folder: str = layout.FOLDER) -> None:
    """Remove the records of this user's processes that ended longer ago than this without removing them."""
    end = time.time() - seconds
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                if not entry.name.startswith(layout.PREFIX) or entry.stat().st_mtime > end:
                    continue  # younger than that: needs no look inside, which takes 1 ms
                record = read(entry.path)
                if record is not None and not record.lives and record.last_sign < end:
                    os.unlink(entry.path)


def ask_for_stacks(path: str | Path) -> None:
    """Ask the process of a record for the stacks of all its threads. Its watchdog writes them when it looks next.

    Raise OSError if the record is gone.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        (asked,) = struct.unpack("=q", os.pread(descriptor, 8, 8 * Word.ASKED))
        os.pwrite(descriptor, struct.pack("=q", asked + 1), 8 * Word.ASKED)
    finally:
        os.close(descriptor)


def have_stacks(path: str | Path) -> bool:
    """Return whether the process of a record has answered `ask_for_stacks`, or its record is gone."""
    try:
        with open(path, "rb") as file:
            file.seek(8 * Word.ASKED)
            asked, answered = struct.unpack("=2q", file.read(16))
    except (OSError, struct.error):
        return True
    return bool(asked == answered)


def stacks(path: str | Path, start: int) -> str:
    """Return the text that faulthandler has appended to a record since its file had ``start`` bytes."""
    try:
        with open(path, "rb") as file:
            file.seek(max(start, layout.STACKS))
            return file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""


class RecordBytes:
    """The bytes of a flight record or a trace, at one time. They may be damaged.

    ``data`` has at least all bytes before the events. ``texts`` is the number of texts in the table. ``words`` and
    ``seconds`` are views of the bytes.
    """

    def __init__(self, data: bytes, texts: int):
        self._data, self._texts = data, texts
        aligned = memoryview(data)[: len(data) // 8 * 8]
        self.words, self.seconds = aligned.cast("q"), aligned.cast("d")

    @property
    def is_valid(self) -> bool:
        """Whether a record or a trace lies here that was begun."""
        return self.words[Word.MAGIC] == layout.MAGIC

    @property
    def is_of_this_version(self) -> bool:
        """Whether this version of the package wrote it."""
        return self.words[Word.VERSION] == layout.VERSION

    def communicator(self, index: int) -> tuple[Any, ...]:
        """Return the token, the size, this rank, and 1 + the number of the last event of a communicator."""
        return layout.COMMUNICATOR.unpack_from(self._data, layout.COMMUNICATORS + index * layout.COMMUNICATOR.size)

    def step_ends(self) -> list[tuple[float, ...]]:
        """Return of the last ends of steps: the time, and the seconds in collectives, input and saving until then."""
        last = self.words[Word.STEPS]
        numbers = range(max(0, last - layout.MOST_STEPS + 1), last)  # without one, which may just be overwritten
        unpack = layout.STEP.unpack_from
        return [unpack(self._data, layout.STEPS + i % layout.MOST_STEPS * layout.STEP.size) for i in numbers]

    def event(self, at: int) -> tuple[Any, ...]:
        """Return the fields of an event, in the order of `layout.EVENT`."""
        return layout.EVENT.unpack_from(self._data, at)

    def header_text(self, offset: int) -> str:
        """Return a text of the header."""
        length = min(max(0, self.words[offset // 8]), layout.TEXT_BYTES)
        return self._data[offset + 8 : offset + 8 + length].decode(errors="replace")

    def text(self, number: int) -> str:
        """Return a text of the table, or an empty one if another has taken its place."""
        offset = layout.TEXTS + number % self._texts * layout.SLOT_BYTES
        if not number or self.words[offset // 8] != number:
            return ""
        return self.header_text(offset + 8)


def _record(contents: RecordBytes, path: str) -> Record:
    words, seconds = contents.words, contents.seconds
    communicators = [contents.communicator(i) for i in range(layout.MOST_COMMUNICATORS)]
    tokens = [token for token, *_ in communicators]
    ends = contents.step_ends()
    first = max(0, (last := words[Word.EVENTS]) - layout.MOST_EVENTS)
    entries = tuple(_entry(contents, i, tokens) for i in range(first, last))
    return Record(
        path=path,
        pid=words[Word.PID],
        started=words[Word.STARTED],
        rank=words[Word.RANK],
        size=words[Word.SIZE],
        main_thread=words[Word.MAIN_THREAD],
        signal=words[Word.SIGNAL],
        host=contents.header_text(layout.HOST),
        launch=contents.header_text(layout.LAUNCH),
        job=contents.header_text(layout.JOB),
        program=contents.header_text(layout.PROGRAM),
        note=contents.header_text(layout.NOTE),
        phase=Phase(words[Word.PHASE]),
        phase_since=seconds[Word.PHASE_SINCE],
        heartbeat=seconds[Word.HEARTBEAT],
        beat_every=seconds[Word.BEAT_EVERY],
        clock=seconds[Word.EPOCH],
        step=max(0, words[Word.STEPS] - 1),
        step_since=ends[-1][0] if ends else 0.0,
        bytes=words[Word.BYTES],
        moves=None if words[Word.MOVES] < 0 else bool(words[Word.MOVES]),
        exit_status=words[Word.EXIT_STATUS] - 1 if words[Word.EXIT_STATUS] else None,
        out_of_memory_kills=words[Word.OUT_OF_MEMORY_KILLS] - 1 if words[Word.OUT_OF_MEMORY_KILLS] else None,
        memberships=tuple(
            Membership(token, size, rank, _entry(contents, after - 1, tokens) if after else None)
            for token, size, rank, after in communicators
            if token
        ),
        steps=tuple((b[0] - a[0], b[1] - a[1], b[2] - a[2], b[3] - a[3]) for a, b in itertools.pairwise(ends)),
        entries=entries,
        kept_lock=bool(words[Word.KEPT_LOCK]),
    )


def _entry(contents: RecordBytes, event: int, tokens: list[int]) -> Entry:
    at = layout.RECORD_EVENTS + event % layout.MOST_EVENTS * layout.EVENT.size
    _, communicator, _, operation, place, number, nbytes, *times = contents.event(at)
    token = tokens[communicator] if communicator < len(tokens) else 0
    return Entry(token, number, contents.text(operation), contents.text(place), nbytes, *times)


def record_as_json(record: Record, most_entries: int = 32) -> dict[str, Any]:
    """Return a record with its last entries."""
    entries = record.entries[-most_entries:]
    return {**dataclasses.asdict(dataclasses.replace(record, entries=entries)), "phase": record.phase.name}


def record_from_json(values: dict[str, Any]) -> Record:
    """Return the record of values that `record_as_json` made."""
    return Record(
        **{
            **values,
            "phase": Phase[values["phase"]],
            "memberships": tuple(
                Membership(**{**membership, "last": Entry(**membership["last"]) if membership["last"] else None})
                for membership in values["memberships"]
            ),
            "steps": tuple(map(tuple, values["steps"])),
            "entries": tuple(Entry(**entry) for entry in values["entries"]),
        }
    )
