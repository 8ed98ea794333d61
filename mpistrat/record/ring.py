"""The trace of this process, while it is written, and the clocks of the ranks: how much one is ahead of another.

Writing a trace never communicates or waits. An event costs less than 1 us.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from mpistrat.process.cache import Cache
from mpistrat.record import layout
from mpistrat.record.layout import Kind, Texts, Word, fill_header, mapped

_ROUNDS = 12  # the fastest of these counts
_P = ParamSpec("_P")
_R = TypeVar("_R")
# Names of this file, not of others: `begin` and `end` read them for each event, which takes 0.6 us.
_thread = threading.get_ident
_pack_event, _pack_end = layout.EVENT.pack_into, struct.Struct("=dd").pack_into
_EVENTS, _EVENT_BYTES, _METS = layout.TRACE_EVENTS, layout.EVENT.size, layout.TRACE_EVENTS + layout.MET
_AT_EVENTS = int(Word.EVENTS)
_FEWEST_EVENTS = 64
_MOST_KNOWN = 4096  # numbers of texts that are remembered


class Sample(NamedTuple):
    """How far the clock of the first rank was ahead of this rank's, at one time."""

    at: float  # by the monotonic clock of this rank
    # the difference in seconds, and how far it may be off
    ahead: float
    error: float
    reference: int  # the number of the first rank's clock


def clock_number() -> int:
    """Return a number that is equal for processes with the same monotonic clock: on one machine since one boot."""
    facts = []
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        facts.append(file.read())
    with contextlib.suppress(OSError):
        facts.append(os.readlink("/proc/self/ns/time"))  # containers may have a clock of their own
    text = "|".join(facts or [os.uname().nodename]).encode()
    return zlib.crc32(text) << 31 | zlib.adler32(text) >> 1  # 63 bits: positive in a signed word


def measure_clocks(world: Any, clocks: Sequence[int]) -> Sample:
    """Return how far the clock of rank 0 is ahead of this rank's. Collective, if there are several clocks.

    ``clocks`` has the number of each rank's clock. Rank 0 exchanges messages with one rank of each other clock. The
    fastest answer of several counts: the error is at most half of the time that it took.
    """
    first = clocks[0]
    others = list(dict.fromkeys(clock for clock in clocks if clock != first))
    now = time.monotonic
    if not others:
        return Sample(now(), 0.0, 0.0, first)
    offsets = np.zeros((len(others), 2))
    answer = np.zeros(1)
    for i, clock in enumerate(others):
        rank = clocks.index(clock)
        if world.rank == 0:
            offsets[i] = 0.0, np.inf
            for _ in range(_ROUNDS):
                sent = now()
                world.Send(answer, rank)
                world.Recv(answer, rank)
                took = now() - sent
                if took / 2 < offsets[i, 1]:  # the clock was read at an unknown moment of the round trip
                    offsets[i] = sent + took / 2 - answer[0], took / 2
        elif world.rank == rank:
            for _ in range(_ROUNDS):
                world.Recv(answer, 0)
                answer[0] = now()
                world.Send(answer, 0)
    world.Bcast(offsets)
    own = clocks[world.rank]
    ahead, error = (0.0, 0.0) if own == first else offsets[others.index(own)].tolist()
    return Sample(now(), ahead, error, first)


class TraceRing:
    """A file of about ``nbytes`` with the last events of this process, which is a rank of ``size`` in its job.

    The directory is made if it does not exist. ``communicators`` has the numbers of communicators in this trace, by
    token. Raise OSError if the file cannot be made, or the disk is full.
    """

    def __init__(self, directory: str, rank: int, size: int, nbytes: int):
        os.makedirs(directory, exist_ok=True)
        name = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}{layout.SUFFIX}"
        self._capacity = max(_FEWEST_EVENTS, (nbytes - layout.TRACE_EVENTS) // layout.EVENT.size)
        self.path = os.path.join(directory, name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            self._memory = mapped(descriptor, self.path, layout.TRACE_EVENTS + self._capacity * layout.EVENT.size)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._memory).cast("q")
        self._seconds = memoryview(self._memory).cast("d")
        self._texts = Texts(self._memory, layout.TRACE_TEXTS)
        self.communicators: dict[int, int] = {}
        self._known: dict[str, int] = {}
        self._of_record = Cache[int, int](_MOST_KNOWN)
        self._threads = {threading.main_thread().ident: 0}
        self._next_event = itertools.count().__next__
        self._lock = threading.RLock()  # not a Lock: a signal handler may come here again
        fill_header(self._memory, self._texts, rank, size, self._capacity)
        self._words[Word.CLOCK] = clock_number()
        self._seconds[Word.BEGAN] = time.monotonic()
        self._words[Word.MAGIC] = layout.MAGIC

    def set_rank(self, rank: int, size: int) -> None:
        """Correct the rank of a process that seemed to be alone."""
        self._words[Word.RANK], self._words[Word.SIZE] = rank, size

    def add_communicator(self, token: int, size: int, rank: int) -> None:
        """Note a communicator, if there is room for it."""
        with self._lock:
            number = len(self.communicators)
            if number < layout.MOST_COMMUNICATORS and token not in self.communicators:
                self.communicators[token] = number
                at = layout.COMMUNICATORS + number * layout.COMMUNICATOR.size
                layout.COMMUNICATOR.pack_into(self._memory, at, token, size, rank, 0)
                self._words[Word.COMMUNICATORS] = number + 1

    def text(self, number: int, text_of: Callable[[int], str]) -> int:
        """Return the number in this trace of a text of the flight record; 0 if the table is full.

        A record writes a text again when it has given its place to another one; a trace has it once.
        """
        copy = self._of_record.get(number)
        if copy is None:
            copy = self._of_record.keep(number, self._add(text_of(number)))
        return copy

    def _add(self, text: str) -> int:
        with self._lock:
            number = self._known.get(text)
            if number is None:
                if len(self._known) >= layout.TRACE_TEXTS:
                    return 0
                number = self._known[text] = self._texts.add(text)
        return number

    def sample(self, sample: Sample) -> None:
        """Note how far the first rank's clock is ahead. With too many samples the last one is replaced."""
        index = min(self._words[Word.SAMPLES], layout.MOST_SAMPLES - 1)
        layout.SAMPLE.pack_into(self._memory, layout.SAMPLES + index * layout.SAMPLE.size, *sample)
        self._words[Word.SAMPLES] = index + 1

    def close(self) -> None:
        """Note that the trace has ended."""
        self._seconds[Word.ENDED] = time.monotonic()

    def span(self, kind: Kind, began: float) -> None:
        """Write an event of this thread that ends now."""
        self.end(self.begin(kind, layout.NO_COMMUNICATOR, 0, 0, 0, 0, began), 0.0, time.monotonic())

    def begin(
        self, kind: int, communicator: int, number: int, operation: int, place: int, nbytes: int, began: float
    ) -> int:
        """Write an event that has not ended. Return its number."""
        ident = _thread()
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads[ident] = len(self._threads) & 0xFFFF  # its field has 2 bytes
        event = self._next_event()  # a different one for each thread
        at = _EVENTS + event % self._capacity * _EVENT_BYTES
        _pack_event(self._memory, at, kind, communicator, thread, operation, place, number, nbytes, began, 0.0, 0.0)
        # Last, so that a reader finds a whole event. Two threads may come here in the other order: the later event is
        # then missing in the file until the next one. A lock would cost more than the event.
        self._words[_AT_EVENTS] = event + 1
        return event

    def end(self, event: int, met: float, ended: float) -> None:
        """Note when an event met the other ranks, and ended."""
        if self._words[_AT_EVENTS] - event <= self._capacity:  # else another event has its place
            _pack_end(self._memory, _METS + event % self._capacity * _EVENT_BYTES, met, ended)


ring: TraceRing | None = None  # of this process; None if it is not traced


def timed(kind: Kind, function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that is an event of the trace, if there is one."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if ring is None:
            return function(*args, **kwargs)
        traced, began = ring, time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            traced.span(kind, began)

    return call


def _forget() -> None:
    """Drop the trace in a forked process, which would write to the file of its parent."""
    global ring
    ring = None


os.register_at_fork(after_in_child=_forget)
