"""The trace of this process, while it is written.

Nothing here communicates or waits. An event costs less than 1 us.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mpistrat.runtime.cache import Cache
from mpistrat.runtime.trace import clock, layout
from mpistrat.runtime.trace.clock import Sample
from mpistrat.runtime.trace.layout import HeaderWord, Kind

_P = ParamSpec("_P")
_R = TypeVar("_R")
_FEWEST_EVENTS = 64
_MOST_KNOWN = 4096  # numbers of texts that are remembered


class TraceRing:
    """A file with the last events of this process.

    Parameters
    ----------
    directory : str
        Made if it does not exist.
    rank, size : int
        Of this process in its job.
    nbytes : int
        The size of the file, about.

    Attributes
    ----------
    path : str
    begin : callable
        ``begin(kind, communicator, number, operation, place, nbytes, time)`` writes an event that has not ended.
        Returns its number.
    end : callable
        ``end(event, met, time)`` notes when it met the other ranks, and ended.

    Raises
    ------
    OSError
        If the file cannot be made, or the disk is full.
    """

    def __init__(self, directory: str, rank: int, size: int, nbytes: int):
        os.makedirs(directory, exist_ok=True)
        host, process = socket.gethostname(), os.getpid()
        name = f"{host}-{process}-{os.urandom(4).hex()}{layout.SUFFIX}"
        capacity = max(_FEWEST_EVENTS, (nbytes - layout.EVENTS) // layout.EVENT.size)
        total = layout.EVENTS + capacity * layout.EVENT.size
        self.path = os.path.join(directory, name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, total)  # a full disk is an error here, not a SIGBUS later
            self._memory = mmap.mmap(descriptor, total)
        except (OSError, ValueError):
            os.unlink(self.path)
            raise
        finally:
            os.close(descriptor)
        self._words = words = memoryview(self._memory).cast("q")
        self._seconds = seconds = memoryview(self._memory).cast("d")
        self._tokens: dict[int, int] = {}
        self._texts: dict[str, int] = {}
        self._of_record = Cache[int, int](_MOST_KNOWN)
        self._lock = threading.RLock()  # not a Lock: a signal handler may come here again
        words[HeaderWord.VERSION] = layout.VERSION
        words[HeaderWord.PID] = process
        words[HeaderWord.RANK], words[HeaderWord.SIZE] = rank, size
        words[HeaderWord.CLOCK], words[HeaderWord.CAPACITY] = clock.number(), capacity
        seconds[HeaderWord.EPOCH] = time.time() - time.monotonic()
        seconds[HeaderWord.BEGAN] = time.monotonic()
        self._write(layout.HOST, host)
        self._write(layout.PROGRAM, " ".join(getattr(sys, "argv", [])[:4]))
        self.begin, self.end = self._writers(capacity)
        words[HeaderWord.MAGIC] = layout.MAGIC

    def belongs_to(self, rank: int, size: int) -> None:
        """Note the rank of a process that was taken for one alone."""
        self._words[HeaderWord.RANK], self._words[HeaderWord.SIZE] = rank, size

    def communicator(self, token: int, size: int, rank: int) -> int:
        """Return the number of a communicator in this trace."""
        found = self._tokens.get(token)
        if found is not None:
            return found
        with self._lock:
            found = len(self._tokens)
            if found >= layout.MOST_COMMUNICATORS:
                return layout.NO_COMMUNICATOR
            self._tokens[token] = found
            at = layout.COMMUNICATORS + found * layout.COMMUNICATOR.size
            layout.COMMUNICATOR.pack_into(self._memory, at, token, size, rank)
            self._words[HeaderWord.COMMUNICATORS] = found + 1
        return found

    def text(self, number: int, text_of: Callable[[int], str]) -> int:
        """Return the number in this trace of a text of the flight record; 0 if the file is full."""
        found = self._of_record.get(number)
        if found is None:
            found = self._of_record.keep(number, self._add(text_of(number)))
        return found

    def _add(self, text: str) -> int:
        with self._lock:
            found = self._texts.get(text)
            if found is None:
                data = text.encode(errors="replace")[: layout.TEXT_BYTES]
                place = self._words[HeaderWord.TEXTS]
                if place + 2 + len(data) > layout.TEXTS_BYTES:
                    return 0
                at = layout.TEXTS + place
                self._memory[at : at + 2 + len(data)] = struct.pack("=H", len(data)) + data
                self._words[HeaderWord.TEXTS] = place + 2 + len(data)
                found = self._texts[text] = place + 1
        return found

    def sample(self, sample: Sample) -> None:
        """Note what the clock of the first rank is ahead. With too many samples the last one is replaced."""
        place = min(self._words[HeaderWord.SAMPLES], layout.MOST_SAMPLES - 1)
        layout.SAMPLE.pack_into(self._memory, layout.SAMPLES + place * layout.SAMPLE.size, *sample)
        self._words[HeaderWord.SAMPLES] = place + 1

    def close(self) -> None:
        """Note that the trace has ended."""
        self._seconds[HeaderWord.ENDED] = time.monotonic()

    def span(self, kind: Kind, began: float) -> None:
        """Write an event of this thread that ends now."""
        self.end(self.begin(kind, layout.NO_COMMUNICATOR, 0, 0, 0, 0, began), 0.0, time.monotonic())

    def _write(self, offset: int, text: str) -> None:
        data = text.encode(errors="replace")[: layout.TEXT_BYTES]
        self._memory[offset + 8 : offset + 8 + len(data)] = data
        self._words[offset // 8] = len(data)

    def _writers(
        self, capacity: int
    ) -> tuple[Callable[[int, int, int, int, int, int, float], int], Callable[[int, float, float], None]]:
        """Return `begin` and `end`: closures, which read a name in half the time of an attribute."""
        memory, words = self._memory, self._words
        pack, pack_end = layout.EVENT.pack_into, struct.Struct("=dd").pack_into
        first, size, at_events, to_met = layout.EVENTS, layout.EVENT.size, int(HeaderWord.EVENTS), layout.MET
        threads = {threading.main_thread().ident: 0}
        thread_of, next_event = threading.get_ident, itertools.count().__next__

        def begin(
            kind: int, communicator: int, number: int, operation: int, place: int, nbytes: int, began: float
        ) -> int:
            own = thread_of()
            thread = threads.get(own)
            if thread is None:
                thread = threads[own] = len(threads) & 0xFFFF
            event = next_event()  # a different one for each thread
            at = first + event % capacity * size
            number &= 0xFFFFFFFF
            pack(memory, at, kind, communicator, thread, number, operation, place, nbytes, began, 0.0, 0.0)
            words[at_events] = event + 1
            return event

        def end(event: int, met: float, ended: float) -> None:
            if words[at_events] - event <= capacity:  # else another event has its place
                pack_end(memory, first + event % capacity * size + to_met, met, ended)

        return begin, end


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
