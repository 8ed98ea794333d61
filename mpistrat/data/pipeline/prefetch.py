"""Elements of an iterator, made ahead of time by a thread."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

from mpistrat import context
from mpistrat.data.pipeline.optional import NextAsOptional
from mpistrat.runtime.agreement import threads

_JOINED_WITHIN = 10.0  # seconds, at the end of the program
_LOOK_EVERY = 5.0
_AT_ONCE = 150e-6  # handing over takes as long: two threads wake each other, and want the interpreter
_OFTEN = 4


class Turns:
    """Who makes an element waits for its turn: functions of the user never run twice at a time.

    An iterator that was left may still be at an element when the next one begins. A child process shares nothing
    with its parent, whose thread may have had the turn when it was made.
    """

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.RLock()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.RLock()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()


class Prefetched(NextAsOptional):
    """The elements of an iterator, in order, of which a thread makes some beforehand.

    The thread ends with the iterator, at its first error, or when this object is closed or collected. What
    it raises is raised where the element would have come, with the thread's own traceback. Strategies
    are the same in the thread as where this object was made, and collectives are refused in it.

    A program that does next to nothing between two elements has nothing to do while they are made, and the two
    threads would only take the interpreter from each other: it then makes them itself, until it takes longer.

    Parameters
    ----------
    elements : iterator
        Used by the thread from now on, and by nobody else.
    most : int
        How many elements may wait.
    at_once : bool
        Whether the user is expected to come back at once. The thread starts when he does not.
    turns : Turns, optional
        In common with others whose elements must not be made at the same time.

    Examples
    --------
    >>> squares = Prefetched((n * n for n in range(4)), most=2)
    >>> list(squares)
    [0, 1, 4, 9]
    """

    def __init__(self, elements: Iterator[Any], most: int, at_once: bool = False, turns: Turns | None = None):
        self._pid = os.getpid()
        self._hand_over = _HandOver(elements, most, at_once, list(context.stack()), turns or Turns())
        self._thread = threading.Thread(target=self._hand_over.make_all, name="mpistrat-read", daemon=True)
        _end_with_program(self._hand_over, self._thread)
        weakref.finalize(self, self._hand_over.close).atexit = False
        if not at_once:
            self._thread.start()

    def __iter__(self) -> Prefetched:
        return self

    def __next__(self) -> Any:
        return self._hand_over.take(self._thread)

    @property
    def at_once(self) -> bool:
        """Whether the elements are made by who takes them."""
        return self._hand_over.all_room_kept

    @property
    def usable(self) -> bool:
        """Whether this process has the thread: a fork leaves it behind."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """Let the thread end after the element that it is at."""
        self._hand_over.close()


class _HandOver:
    """Elements that wait, and room for more; what the thread and its user have in common.

    Who makes an element needs room for it, which its user gives back when he takes it. He keeps the room while
    he comes back at once, and makes the elements himself when he has all of it: then the thread has none.
    """

    def __init__(
        self, elements: Iterator[Any], most: int, at_once: bool, modes: list[context.Mode], turns: Turns
    ):
        self._pid = os.getpid()
        self._elements = elements
        self._modes = modes
        self._turns = turns
        self._room: SimpleQueue[None] = SimpleQueue()
        self._waiting: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._closed = False
        self._most, self._kept = most, most
        self._taken, self._at_once = (math.inf, _OFTEN) if at_once else (0.0, 0)
        if not at_once:
            self._give_room()

    def make_all(self) -> None:
        """Make elements while they are wanted: what the thread does."""
        ended = False
        while not ended:
            self._room.get()
            if self._closed:
                return
            made = self._make()
            ended = made[1] is not None
            self._waiting.put(made)
            del made  # nobody but its user holds it

    def _make(self) -> tuple[Any, BaseException | None]:
        modes = context.stack()
        before = modes[:]
        modes[:] = self._modes
        try:
            with self._turns, threads.without_collectives():
                return next(self._elements), None
        except BaseException as error:
            return None, error
        finally:
            modes[:] = before

    def take(self, thread: threading.Thread) -> Any:
        """The next element, or its error."""
        if self._closed:
            raise StopIteration
        at_once = time.perf_counter() - self._taken < _AT_ONCE
        self._at_once = self._at_once + 1 if at_once else 0
        if at_once and self.all_room_kept:
            element, error = self._make()
        else:
            element, error = self._wait(thread)
        if error is not None:
            self.close()
            try:
                raise error
            finally:
                error = None  # or the frame and its error keep each other
        self._taken = time.perf_counter()
        return element

    def _wait(self, thread: threading.Thread) -> tuple[Any, BaseException | None]:
        """What the thread has made next."""
        if not self._at_once:
            self._give_room()
            if thread.ident is None:
                thread.start()
        while True:
            try:
                found = self._waiting.get(timeout=_LOOK_EVERY)
                break
            except Empty:
                if not thread.is_alive():
                    raise RuntimeError(
                        "the thread that reads ahead has died; fix: use prefetch(0) to see why"
                    ) from None
        self._kept += 1
        if self._at_once < _OFTEN:
            self._give_room()
        return found

    @property
    def all_room_kept(self) -> bool:
        """Whether the thread has no room to make anything."""
        return self._kept == self._most

    def _give_room(self) -> None:
        while self._kept:
            self._kept -= 1
            self._room.put(None)

    def close(self) -> None:
        """Want no more elements, and drop those that wait."""
        if os.getpid() != self._pid:
            return  # the thread is in the parent, and may have held a lock when this process was made
        self._closed = True
        self._room.put(None)
        with contextlib.suppress(Empty):
            while True:
                self._waiting.get_nowait()


_running: weakref.WeakKeyDictionary[threading.Thread, _HandOver] = weakref.WeakKeyDictionary()


def _end_with_program(hand_over: _HandOver, thread: threading.Thread) -> None:
    if not _running:
        atexit.unregister(_end_all)
        atexit.register(_end_all)  # anew, so as to run before the exit of what was imported since
    _running[thread] = hand_over


def _end_all() -> None:
    """No thread may be inside a library when that is torn down."""
    for thread, hand_over in list(_running.items()):
        hand_over.close()
        if thread.ident is not None:
            thread.join(_JOINED_WITHIN)
