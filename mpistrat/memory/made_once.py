"""A ring of memory in which a rank finds what another rank of its node has made, without messages."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpistrat.memory.node import pages, share_in_pieces
from mpistrat.process.waiting import Backoff

_ENTRIES = 4096
_MOST_SHARES = 4
_LINE = 64  # bytes of a cache line
_PATIENCE = 1.0  # seconds; for a part, four times the longest that this rank took to make one are added
_FREE, _BEING_MADE, _READY = range(3)
Each = Callable[[Sequence[Any], Callable[[Any], Any]], None]


class Chunk(NamedTuple):
    """Bytes of which several ranks need some rows."""

    key: Any  # its ``repr`` says what the bytes are, with the version of the file that they are from
    # size, number of rows that this rank reads now, and of those that it or others may read later
    nbytes: int
    rows: int
    lacks: int
    # returns the bytes, in the array of uint8 that it is given, or in any other memory if it is given None
    make: Callable[[np.ndarray | None], Any]
    # copies the rows from what ``make`` returned. It is called again if the bytes changed meanwhile.
    use: Callable[[Any], Any]


class _Entry(NamedTuple):
    """An entry of the table: its place there, state, first byte, and how many entries were made before it."""

    place: int
    state: int
    start: int
    number: int


class MadeOnce:
    """Bytes that the ranks of a node make once and keep for each other, the last ones that fit.

    By a table in the same memory, a rank copies a part that is ready, makes a missing one, and waits for one in the
    making. The oldest parts make room, also while they are copied: a rank looks again after its copy.

    No rank depends on another. After a second and four times what making takes, a rank makes a part itself. One that
    does not get the lock of the table within a second works alone from then on.

    The ring has ``nbytes`` for each rank, up to four, since ranks may be at different places of an epoch, and ``most``
    at most. Making it is collective over ``node``. Raise NoSharedMemoryError on all its ranks if they cannot share.
    """

    def __init__(self, nbytes: int, most: int, node: Any):
        self._ranks = min(node.size, _MOST_SHARES)
        self._nbytes = min(self._ranks * nbytes, most)
        self._memory, self._descriptor = share_in_pieces(self, node, self._nbytes, 8 * (2 + 6 * _ENTRIES))
        self._lock_at = pages(self._nbytes)
        words = self._memory[self._lock_at :].view(np.int64)
        self._head = words[:2]  # number of the next entry, and where the last one ends
        # State, two halves of a key, first byte, one past the last, number.
        self._table = words[2 : 2 + 6 * _ENTRIES].reshape(6, _ENTRIES)
        self._begin = node.rank / node.size
        self._threads = threading.Lock()
        self._longest = 0.0
        self._usable = True

    def limit(self, nbytes: int) -> None:
        """Use no more than so many bytes for each rank. Called on all ranks, before the ring is used."""
        self._nbytes = min(self._nbytes, self._ranks * nbytes)

    def each(self, parts: Sequence[Chunk], for_each: Each) -> list[Chunk]:
        """Make and use parts, by a function that calls another on each item. Return those that do not fit."""
        left: list[Chunk] = []
        later: list[Chunk] = []
        begin = int(self._begin * len(parts))  # ranks that begin together make different parts
        for_each([*parts[begin:], *parts[:begin]], partial(self._one, left, later))
        for_each(later, partial(self._one, left, None))
        return left

    def _one(self, left: list[Chunk], later: list[Chunk] | None, part: Chunk) -> None:
        """Use a part, or make it. If another rank makes it, append it to ``later`` if that is a list, or wait."""
        digest = hashlib.blake2b(repr(part.key).encode(), digest_size=16).digest()
        low, high = np.frombuffer(digest, np.int64).tolist()
        backoff, until = Backoff(), 0.0
        while True:
            found, mine = None, False
            with self._locked() as locked:
                if locked:
                    found = self._find(low, high)
                    if found is None:
                        found, mine = self._claim(low, high, part.nbytes), True
            if found is None or (mine and not self._made(part, found)):
                left.append(part)
                return
            if mine:
                return
            if found.state == _READY:
                part.use(self._memory[found.start : found.start + part.nbytes])
                with self._locked() as locked:
                    if locked and self._find(low, high) == found:
                        return
            elif later is not None:
                later.append(part)
                return
            else:
                now = time.monotonic()
                until = until or now + _PATIENCE + 4 * self._longest
                if now > until:
                    self._end(found, _BEING_MADE)
                    until = 0.0
                backoff.pause()

    def _made(self, part: Chunk, found: _Entry) -> bool:
        state, began = _FREE, time.monotonic()
        try:
            try:  # the pages are reserved here, so that a lack of memory is not a SIGBUS
                os.posix_fallocate(self._descriptor, found.start, part.nbytes)
            except OSError:
                return False
            memory = self._memory[found.start : found.start + part.nbytes]
            part.make(memory)
            part.use(memory)
            state = _READY
            return True
        finally:
            self._longest = max(self._longest, time.monotonic() - began)
            self._end(found, state)

    def _find(self, low: int, high: int) -> _Entry | None:
        states, lows, highs, starts, _, numbers = self._table
        for place in np.flatnonzero(lows == low).tolist():
            if highs[place] == high and states[place] != _FREE:
                return _Entry(place, int(states[place]), int(starts[place]), int(numbers[place]))
        return None

    def _claim(self, low: int, high: int, nbytes: int) -> _Entry | None:
        """Return a new entry. A rank may end between any two writes: the state is written first and last."""
        states, _, _, starts, stops, _ = self._table
        number, head = self._head.tolist()
        place = number % _ENTRIES
        busy = np.flatnonzero(states == _BEING_MADE).tolist()
        size = -(-nbytes // _LINE) * _LINE
        # Round the ring from the newest entry on. The place behind a busy entry is often that of the newest one: taken
        # before the ring began again, it made a rank decode 1 chunk of 61 twice.
        for start in (head, *sorted({0, *stops[busy].tolist()}, key=lambda at: (at < head, at))):
            stop = start + size
            if stop <= self._nbytes and not any(starts[it] < stop and stops[it] > start for it in busy):
                break
        else:
            return None
        if place in busy:
            return None
        states[(starts < stop) & (stops > start) & (states == _READY)] = _FREE
        states[place] = _FREE
        self._table[1:, place] = low, high, start, stop, number
        self._head[:] = number + 1, stop
        states[place] = _BEING_MADE
        return _Entry(place, _BEING_MADE, start, number)

    def _end(self, entry: _Entry, state: int) -> None:
        """End the making of an entry. ``_BEING_MADE`` gives it up: no key leads to it, until its own rank ends it."""
        with self._locked() as locked:
            states, *halves, _, _, numbers = self._table
            if locked and numbers[entry.place] == entry.number and states[entry.place] == _BEING_MADE:
                if state == _BEING_MADE:
                    for half in halves:
                        half[entry.place] = 0
                elif any(half[entry.place] for half in halves):
                    states[entry.place] = state
                else:
                    states[entry.place] = _FREE

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Lock the table; yield False if another rank or thread holds it for too long."""
        until, backoff = time.monotonic() + _PATIENCE, Backoff()
        if not self._usable or not self._threads.acquire(timeout=_PATIENCE):
            yield False
            return
        try:
            while self._usable:
                try:
                    fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._lock_at)
                    break
                except BlockingIOError:
                    self._usable = time.monotonic() < until
                    backoff.pause()
            try:
                yield self._usable
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._lock_at)
        finally:
            self._threads.release()


def in_turn(items: Sequence[Any], do: Callable[[Any], Any]) -> None:
    """Call a function on each item, in this thread."""
    for each in items:
        do(each)
