"""Memory in which a rank finds what another rank of its node has made, without messages: a ring, or fixed pieces."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpistrat.memory.buffer_pool import new_memory
from mpistrat.memory.node import pages, share_in_pieces
from mpistrat.process.waiting import Backoff

_ENTRIES = 4096
_MOST_SHARES = 4
_LINE = 64  # bytes of a cache line
_STALLED_S = 1.0  # seconds; for a chunk, four times the longest that this rank took to make one are added
_FREE, _BEING_MADE, _READY = range(3)
ForEach = Callable[[Sequence[Any], Callable[[Any], Any]], None]


class Chunk(NamedTuple):
    """Bytes of which several ranks need some rows."""

    key: Any  # its ``repr`` says what the bytes are, with the version of the file that they are from
    # size, number of rows that this rank reads now, and number of rows that any rank may read later
    nbytes: int
    rows: int
    lacks: int
    # returns the bytes, in its argument, an array of uint8, or in any other memory if that is None
    make: Callable[[np.ndarray | None], Any]
    # copies the rows from what ``make`` returned. It is called again if the bytes changed meanwhile.
    use: Callable[[Any], Any]


class _Entry(NamedTuple):
    """An entry of the table: its slot, state, first byte, and how many entries were made before it."""

    slot: int
    state: int
    start: int
    number: int


class MadeOnce:
    """Bytes that the ranks of a node make once and keep for each other, as many of the last as fit.

    By a table in the same memory, a rank copies a chunk that is ready, makes a missing one, and waits for one in the
    making. The oldest chunks make room, also while they are copied: a rank looks again after its copy.

    No rank depends on another. After a second and four times what making takes, a rank makes a chunk itself. A rank
    that does not get the lock of the table within a second works alone from then on.

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

    def use_all(self, chunks: Sequence[Chunk], for_each: ForEach) -> list[Chunk]:
        """Make and use chunks, by a function that calls another on each item. Return the chunks that do not fit."""
        rejected: list[Chunk] = []
        later: list[Chunk] = []
        begin = int(self._begin * len(chunks))  # ranks that begin together make different chunks
        for_each([*chunks[begin:], *chunks[:begin]], partial(self._use, rejected, later))
        for_each(later, partial(self._use, rejected, None))
        return rejected

    def _use(self, rejected: list[Chunk], later: list[Chunk] | None, chunk: Chunk) -> None:
        """Use a chunk, or make it. If another rank makes it, append it to ``later`` if that is a list, or wait."""
        digest = hashlib.blake2b(repr(chunk.key).encode(), digest_size=16).digest()
        low, high = np.frombuffer(digest, np.int64).tolist()
        backoff, until = Backoff(), 0.0
        while True:
            entry, claimed = None, False
            with self._locked() as locked:
                if locked:
                    entry = self._find(low, high)
                    if entry is None:
                        entry, claimed = self._claim(low, high, chunk.nbytes), True
            if entry is None or (claimed and not self._make(chunk, entry)):
                rejected.append(chunk)
                return
            if claimed:
                return
            if entry.state == _READY:
                chunk.use(self._memory[entry.start : entry.start + chunk.nbytes])
                with self._locked() as locked:
                    if locked and self._find(low, high) == entry:
                        return
            elif later is not None:
                later.append(chunk)
                return
            else:
                now = time.monotonic()
                until = until or now + _STALLED_S + 4 * self._longest
                if now > until:
                    self._end(entry, _BEING_MADE)
                    until = 0.0
                backoff.pause()

    def _make(self, chunk: Chunk, entry: _Entry) -> bool:
        state, began = _FREE, time.monotonic()
        try:
            try:  # the pages are reserved here, so that a lack of memory is not a SIGBUS
                os.posix_fallocate(self._descriptor, entry.start, chunk.nbytes)
            except OSError:
                return False
            memory = self._memory[entry.start : entry.start + chunk.nbytes]
            chunk.make(memory)
            chunk.use(memory)
            state = _READY
            return True
        finally:
            self._longest = max(self._longest, time.monotonic() - began)
            self._end(entry, state)

    def _find(self, low: int, high: int) -> _Entry | None:
        states, lows, highs, starts, _, numbers = self._table
        for slot in np.flatnonzero(lows == low).tolist():
            if highs[slot] == high and states[slot] != _FREE:
                return _Entry(slot, int(states[slot]), int(starts[slot]), int(numbers[slot]))
        return None

    def _claim(self, low: int, high: int, nbytes: int) -> _Entry | None:
        """Return a new entry. A rank may end between any two writes: the state is written first and last."""
        states, _, _, starts, stops, _ = self._table
        number, head = self._head.tolist()
        slot = number % _ENTRIES
        busy = np.flatnonzero(states == _BEING_MADE).tolist()
        size = -(-nbytes // _LINE) * _LINE
        # Round the ring from the newest entry on. Behind a busy entry often lies the newest one: taken
        # before the ring began again, it made a rank decode 1 chunk of 61 twice.
        for start in (head, *sorted({0, *stops[busy].tolist()}, key=lambda at: (at < head, at))):
            stop = start + size
            if stop <= self._nbytes and not any(starts[i] < stop and stops[i] > start for i in busy):
                break
        else:
            return None
        if slot in busy:
            return None
        states[(starts < stop) & (stops > start) & (states == _READY)] = _FREE
        states[slot] = _FREE
        self._table[1:, slot] = low, high, start, stop, number
        self._head[:] = number + 1, stop
        states[slot] = _BEING_MADE
        return _Entry(slot, _BEING_MADE, start, number)

    def _end(self, entry: _Entry, state: int) -> None:
        """End the making of an entry. ``_BEING_MADE`` gives it up: no key leads to it, until its own rank ends it."""
        with self._locked() as locked:
            states, *halves, _, _, numbers = self._table
            if locked and numbers[entry.slot] == entry.number and states[entry.slot] == _BEING_MADE:
                if state == _BEING_MADE:
                    for half in halves:
                        half[entry.slot] = 0
                elif any(half[entry.slot] for half in halves):
                    states[entry.slot] = state
                else:
                    states[entry.slot] = _FREE

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Lock the table; yield False if another rank or thread holds it for too long."""
        until, backoff = time.monotonic() + _STALLED_S, Backoff()
        if not self._usable or not self._threads.acquire(timeout=_STALLED_S):
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
    for item in items:
        do(item)


class FilledOnce:
    """Bytes in pieces. The first rank that needs a piece fills it. The other ranks find it filled.

    Ranks exclude each other by a lock of the system for each piece, which it frees if a rank fails, and threads by one
    lock. Pages are reserved when their piece is filled: a lack of memory is an error of `fill`, not a SIGBUS.

    The ranks of ``node`` share the memory, and make the object together; without it, the memory is private. This rank
    should begin at the fraction ``begin`` of the pieces. Raise NoSharedMemoryError on every rank of the node, or
    OSError alone, if memory is short.

    >>> numbers = FilledOnce(8, 2)
    >>> for _ in range(2):
    ...     numbers.fill(1, [(4, 4)], lambda: numbers.memory[4:].__iadd__(1))
    >>> numbers.memory.tolist()
    [0, 0, 0, 0, 1, 1, 1, 1]
    """

    def __init__(self, nbytes: int, pieces: int, node: Any = None):
        self._descriptor: int | None = None
        self._filled: Any = bytearray(pieces)
        self.begin = 0.0
        if node is None or node.size == 1:
            memory, start = new_memory(max(1, nbytes))
            self.memory = np.frombuffer(memory, np.uint8, nbytes, start)
            return
        self.begin = node.rank / node.size
        self._locks = pages(nbytes)
        self.memory, self._descriptor = share_in_pieces(self, node, nbytes, pieces)
        self._filled = self.memory[self._locks :]

    def fill(self, piece: int, spans: Iterable[tuple[int, int]], load: Callable[[], Any]) -> None:
        """Call ``load`` to fill a piece, the bytes of ``spans`` (start, number), unless a rank of the node has done so.

        Raise OSError if the node has not enough memory.
        """
        with self._locked(piece):
            if not self._filled[piece]:
                if self._descriptor is not None:
                    # A page that the node has no memory for would end the process when it is written to.
                    for start, nbytes in spans:
                        os.posix_fallocate(self._descriptor, start, max(1, nbytes))
                load()
                self._filled[piece] = 1

    @contextlib.contextmanager
    def _locked(self, piece: int) -> Iterator[None]:
        # A lock of the system belongs to the process: its threads would fill a piece twice. One lock for all objects,
        # because the system reports a deadlock if two threads of a process wait for and hold locks of two objects.
        with _filling:
            if self._descriptor is None:
                yield
                return
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, self._locks + piece)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._locks + piece)


_filling = threading.Lock()


def _renew_lock() -> None:
    """Make a new lock in a forked child: a thread of its parent may have held the lock during the fork."""
    global _filling
    _filling = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
