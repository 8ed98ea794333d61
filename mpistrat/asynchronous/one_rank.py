"""A dispatcher for one rank, which runs the tasks itself."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from mpistrat.asynchronous.statistics import Clock, Statistics, WorkerStatistics
from mpistrat.asynchronous.task import Task
from mpistrat.messages.pickling import unpack


class OneRank:
    """Tasks that run in the thread that calls `progress`, one after the other, on copies of functions and arguments."""

    def __init__(self, comm: Any):
        self._comm = comm
        self._queue: deque[Task] = deque()
        self._clock = Clock()
        self._running = self._ended = self._failed = 0
        self._busy = 0.0

    def add(self, task: Task) -> None:
        self._clock.start()
        self._queue.append(task)

    def progress(self) -> bool:
        """Run the next task. Return whether there was one."""
        if not self._queue:
            return False
        task = self._queue.popleft()
        value: Any = None
        error: BaseException | None = None
        if task.began is None or task.began():
            start, self._running = time.perf_counter(), task.calls
            try:
                args, kwargs = unpack(task.arguments)
                together = () if task.ranks is None else (self._comm,)
                value = unpack(task.function.packed)(*together, *args, **kwargs)
                if task.seconds is not None and time.perf_counter() - start > task.seconds:
                    raise TimeoutError(f"the function ran for more than {task.seconds:g} s, its time limit")
            except BaseException as raised:  # sys.exit() in a task must not end the thread
                value, error = None, raised
            self._running = 0
            self._busy += time.perf_counter() - start
            self._ended += task.calls
            self._failed += error is not None
            self._clock.note()
        task.ended(value, error)
        return True

    def statistics(self) -> Statistics:
        waiting = sum(task.calls for task in self._queue)
        seconds = self._clock.seconds(bool(self._running or waiting))
        worker = WorkerStatistics(0, self._ended, self._failed, self._busy)
        return Statistics(waiting, self._running, self._ended, seconds, (worker,))
