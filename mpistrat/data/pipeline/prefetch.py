"""Prefetching: a thread makes the next elements of an iterator."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from mpistrat import context
from mpistrat.data.pipeline.optional import NextAsOptional
from mpistrat.process import program_end
from mpistrat.process.program_end import EndStep
from mpistrat.runtime.agreement import collective_lock

_JOINED_WITHIN = 10.0  # seconds, at the end of the program
_LOOK_EVERY = 5.0  # seconds, after which a caller that waits looks whether the thread is alive
_AT_ONCE = 150e-6  # seconds; handing over takes as long: the threads wake each other and compete for the GIL
_OFTEN = 4  # elements in a row for which a thread wins nothing, before the caller keeps the permits
_COUNTED = 256  # elements after which older ones count half

_Outcome: TypeAlias = "tuple[Any, float, BaseException | None]"  # an element, and the seconds it took; or an error


class MakingLock:
    """A lock for making elements, so that functions of the program never run in two threads at once.

    The thread of an abandoned iterator may still make an element when the next begins. A forked child makes a new lock.
    """

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.RLock()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.RLock()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[MakingLock], tuple[()]]:
        return MakingLock, ()


class Prefetched(NextAsOptional[Any]):
    """The elements of an iterator, in order. A thread makes the next ones, of which at most ``most`` may wait.

    The thread ends with the iterator, at its first error, which is raised in place of the element, or when this object
    is closed or collected. It has the strategy in which this object was made, and may not make collective calls.
    Elements of two iterators that have one ``making`` lock are not made at the same time.

    The caller makes the elements itself while the thread would win nothing: while it does hardly any work between two
    elements, or one takes less time than handing it over. The two would only compete for the GIL. The thread starts at
    the second element in a row that takes longer, or when a few take so long that the mean is longer. With ``in_line``
    that is expected, and the thread does not start before.
    """

    def __init__(self, elements: Iterator[Any], most: int, in_line: bool = False, making: MakingLock | None = None):
        self._pid = os.getpid()
        self._hand_over = _HandOver(elements, most, in_line, list(context.stack()), making or MakingLock())
        if not in_line:
            self._hand_over.start(self)

    def __iter__(self) -> Prefetched:
        return self

    def __next__(self) -> Any:
        return self._hand_over.take(self)

    @property
    def in_line(self) -> bool:
        """Whether the caller makes the elements itself."""
        return self._hand_over.all_room_kept

    @property
    def usable(self) -> bool:
        """Whether this process has the thread. A forked child does not have it."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """Let the thread end after the element that it is making."""
        self._hand_over.close()


class _Costs:
    """Seconds that elements took. Two are left out: the first may open files, and the system may interrupt any."""

    def __init__(self, expected: float):
        self._last = expected, expected
        self._largest = 0.0, 0.0
        self._sum = self._count = 0.0

    def add(self, cost: float) -> None:
        """Count an element."""
        self._last = self._last[1], cost
        less, large = self._largest
        if cost > less:  # rare: without a list to sort
            less, *largest = sorted((less, large, cost))
            self._largest = largest[0], largest[1]
            cost = less
        self._sum += cost
        self._count += 1
        if self._count > _COUNTED:
            self._sum, self._count = self._sum / 2, self._count / 2

    @property
    def are_low(self) -> bool:
        """Whether one of the last two elements, and the mean, took less time than handing over takes."""
        return min(self._last) < _AT_ONCE and self._sum <= self._count * _AT_ONCE


class _HandOver:
    """The queue between the thread and the caller: elements that wait, and permits ("room") to make one more.

    The caller returns the permit when it takes the element. While the thread would win nothing, the caller keeps the
    permits. When it has all of them, it makes the elements itself.
    """

    def __init__(
        self, elements: Iterator[Any], most: int, in_line: bool, modes: list[context.Mode], making: MakingLock
    ):
        self._pid = os.getpid()
        self._elements = elements
        self._modes = modes
        self._making = making
        self._room: SimpleQueue[None] = SimpleQueue()
        self._waiting: SimpleQueue[_Outcome] = SimpleQueue()
        self._closed = False
        self._most, self._kept = most, most
        # `in_line` begins as if the caller had asked at once so far, and elements had cost nothing.
        self._taken, self._in_a_row = (math.inf, _OFTEN) if in_line else (0.0, 0)
        self._costs = _Costs(0.0 if in_line else math.inf)
        self.thread: threading.Thread | None = None

    def start(self, owner: Prefetched) -> None:
        """Start the thread. It ends with ``owner``, and with the program."""
        self._give_room()
        self.thread = threading.Thread(target=self.make_all, name="mpistrat-read", daemon=True)
        _running.add(self)
        program_end.register(EndStep.READERS, _end_all)
        # At the end of the program, `_end_all` closes it and waits for the thread.
        weakref.finalize(owner, self.close).atexit = False
        self.thread.start()

    def make_all(self) -> None:
        """Make elements until the end or until closed: the function of the thread."""
        ended = False
        while not ended:
            self._room.get()
            if self._closed:
                return
            outcome = self._make()
            ended = outcome[2] is not None
            self._waiting.put(outcome)
            del outcome  # only the caller keeps the element alive

    def _make(self) -> _Outcome:
        modes = context.local.stack
        before = modes[:]
        modes[:] = self._modes
        this = threading.get_ident()
        made_inside = this in collective_lock.forbidden_threads  # by a function that makes another element
        collective_lock.forbidden_threads.setdefault(this, collective_lock.MAKES_A_BATCH)
        try:
            with self._making:
                began = time.perf_counter()
                element = next(self._elements)
                return element, time.perf_counter() - began, None
        except BaseException as error:
            return None, 0.0, error
        finally:
            if not made_inside:
                collective_lock.forbidden_threads.pop(this, None)
            modes[:] = before

    def take(self, owner: Prefetched) -> Any:
        """Return the next element, or raise its error."""
        if self._closed:
            raise StopIteration
        in_line = time.perf_counter() - self._taken < _AT_ONCE or self._costs.are_low
        self._in_a_row = self._in_a_row + 1 if in_line else 0
        if in_line and self._kept == self._most:
            element, cost, error = self._make()
        else:
            element, cost, error = self._wait(owner)
        if error is not None:
            self.close()
            try:
                raise error
            finally:
                error = None  # breaks the reference cycle of the frame and its error
        self._costs.add(cost)
        self._taken = time.perf_counter()
        return element

    def _wait(self, owner: Prefetched) -> _Outcome:
        """Return the next element of the thread, or its error; start the thread if needed."""
        if self.thread is None:
            self.start(owner)
        elif not self._in_a_row:
            self._give_room()
        while True:
            try:
                outcome = self._waiting.get(timeout=_LOOK_EVERY)
                break
            except Empty:
                if self.thread is None or not self.thread.is_alive():
                    raise RuntimeError("the thread that reads ahead died; fix: use prefetch(0) to see why") from None
        self._kept += 1
        if self._in_a_row < _OFTEN:
            self._give_room()
        return outcome

    @property
    def all_room_kept(self) -> bool:
        """Whether the caller keeps all permits, so that the thread makes no elements."""
        return self._kept == self._most

    def _give_room(self) -> None:
        while self._kept:
            self._kept -= 1
            self._room.put(None)

    def close(self) -> None:
        """End the thread after its current element, and drop the elements that wait."""
        if os.getpid() != self._pid:
            return  # the thread is in the parent, and may have held a lock of the queue during the fork
        self._closed = True
        self._room.put(None)  # wakes the thread
        with contextlib.suppress(Empty):
            while True:
                self._waiting.get_nowait()


_running: weakref.WeakSet[_HandOver] = weakref.WeakSet()  # a thread keeps its own alive


def _end_all() -> None:
    """End all threads at exit, so that none is inside a library when the library is torn down."""
    for hand_over in list(_running):
        hand_over.close()
        if hand_over.thread is not None:
            hand_over.thread.join(_JOINED_WITHIN)
