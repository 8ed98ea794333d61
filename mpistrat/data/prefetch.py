"""Elements of an iterator, made ahead of time by a thread."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

from mpistrat import context
from mpistrat.runtime import threads

_JOINED_WITHIN = 10.0  # seconds, at the end of the program
_LOOK_EVERY = 5.0


class Prefetched:
    """The elements of an iterator, in order, of which a thread makes some beforehand.

    The thread ends with the iterator, at its first error, or when this object is closed or collected. What
    it raises is raised where the element would have come, with the thread's own traceback. Strategies
    are the same in the thread as where this object was made, and collectives are refused in it.

    Parameters
    ----------
    elements : iterator
        Used by the thread from now on, and by nobody else.
    most : int
        How many elements may wait.

    Examples
    --------
    >>> squares = Prefetched((n * n for n in range(4)), most=2)
    >>> list(squares)
    [0, 1, 4, 9]
    """

    def __init__(self, elements: Iterator[Any], most: int):
        self._pid = os.getpid()
        self._hand_over = _HandOver(most)
        modes = list(context.stack())
        self._thread = threading.Thread(
            target=_make, args=(self._hand_over, elements, modes), name="mpistrat-read", daemon=True
        )
        _end_with_program(self._hand_over, self._thread)
        weakref.finalize(self, self._hand_over.close).atexit = False
        self._thread.start()

    def __iter__(self) -> Prefetched:
        return self

    def __next__(self) -> Any:
        return self._hand_over.take(self._thread)

    @property
    def usable(self) -> bool:
        """Whether this process has the thread: a fork leaves it behind."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """Let the thread end after the element that it is at."""
        self._hand_over.close()


class _HandOver:
    """Elements that wait, and room for more; what the thread and its user have in common."""

    def __init__(self, most: int):
        self._pid = os.getpid()
        self._room: SimpleQueue[None] = SimpleQueue()
        self._waiting: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._closed = False
        for _ in range(most):
            self._room.put(None)

    def make(self, elements: Iterator[Any]) -> None:
        """Make elements while they are wanted: what the thread does."""
        ended = False
        while not ended:
            self._room.get()
            if self._closed:
                return
            element, error = None, None
            try:
                element = next(elements)
            except BaseException as raised:
                error, ended = raised, True
            self._waiting.put((element, error))
            del element, error  # nobody but its user holds it

    def take(self, thread: threading.Thread) -> Any:
        """The next element, or its error."""
        if self._closed:
            raise StopIteration
        while True:
            try:
                element, error = self._waiting.get(timeout=_LOOK_EVERY)
                break
            except Empty:
                if not thread.is_alive():
                    raise RuntimeError(
                        "the thread that reads ahead has died; fix: use prefetch(0) to see why"
                    ) from None
        self._room.put(None)
        if error is not None:
            self.close()
            try:
                raise error
            finally:
                error = None  # or the frame and its error keep each other
        return element

    def close(self) -> None:
        """Want no more elements, and drop those that wait."""
        if os.getpid() != self._pid:
            return  # the thread is in the parent, and may have held a lock when this process was made
        self._closed = True
        self._room.put(None)
        with contextlib.suppress(Empty):
            while True:
                self._waiting.get_nowait()


def _make(hand_over: _HandOver, elements: Iterator[Any], modes: list[context.Mode]) -> None:
    """The thread."""
    context.stack()[:] = modes
    with threads.without_collectives():
        hand_over.make(elements)


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
        thread.join(_JOINED_WITHIN)
