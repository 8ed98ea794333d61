"""Tasks: functions that a worker runs, and the queue of those that wait for one."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from mpistrat.messages.backoff import Backoff
from mpistrat.messages.contact import Contact
from mpistrat.messages.functions import SentFunction
from mpistrat.messages.pickling import Packed, unpack
from mpistrat.messages.post import Letter

_QUICK = 0.002  # seconds; a worker whose last task took less is handed one more before it asks


class Task:
    """One call of a function by any worker.

    Parameters
    ----------
    function : SentFunction
    arguments : Packed
        The positional and keyword arguments.
    strategy : int or None
        Number of the strategy in whose scope it runs.
    owner : object
        The coordinator or executor that it belongs to.
    kept : object
        What must live until the task has ended.
    ended : callable
        Called with the result and the error, of which one is None.
    began : callable, optional
        Called when the task is handed to a worker. Returns False if it was cancelled: ``ended`` is then called with
        None and None.
    """

    __slots__ = ("arguments", "began", "ended", "function", "kept", "number", "owner", "strategy")

    def __init__(
        self,
        function: SentFunction,
        arguments: Packed,
        strategy: int | None,
        owner: object,
        kept: object,
        ended: Callable[[Any, BaseException | None], None],
        began: Callable[[], bool] | None = None,
    ):
        self.function, self.arguments, self.strategy = function, arguments, strategy
        self.owner, self.kept, self.ended, self.began = owner, kept, ended, began
        self.number = -1


class _Worker:
    """What the coordinator knows of a worker: the tasks that it has, and whether they are short."""

    __slots__ = ("dropping", "quick", "rank", "tasks")

    def __init__(self, rank: int):
        self.rank = rank
        self.tasks: dict[int, Task] = {}
        self.quick = False
        self.dropping = False


class Dispatcher:
    """The tasks of a coordinator: queued, and handed to workers that have nothing to do.

    It makes progress in `progress`, which all other calls use. A worker has one task at a time, or two if its last
    one was short: it then begins the second before the coordinator has seen the result of the first.

    Parameters
    ----------
    contact : Contact
    """

    def __init__(self, contact: Contact):
        self._contact = contact
        self._post = contact.post
        self._queue: deque[Task] = deque()
        self._workers = {rank: _Worker(rank) for rank in contact.roles.workers}
        self._numbers = itertools.count()
        self._busy = False  # whether no worker takes another task before it has sent a result
        self._open: Counter[int] = Counter()
        self._cancelling: dict[int, Callable[[], BaseException]] = {}  # by owner
        self._ended: deque[tuple[Task, Any, BaseException | None]] = deque()
        self.lock = contact.post.lock
        self.freed: deque[int] = deque()

    @property
    def queued(self) -> int:
        """Number of tasks that wait for a worker."""
        return len(self._queue)

    def unfinished(self, owner: object) -> int:
        """Return the number of tasks of an owner that have not ended."""
        return self._open.get(id(owner), 0)

    def add(self, task: Task) -> None:
        """Queue a task."""
        with self.lock:
            self._open[id(task.owner)] += 1
            self._queue.append(task)
        self.progress()

    def tell_workers(self, kind: str, head: tuple[Any, ...], body: Packed) -> None:
        """Send a letter to every worker, which acts on it before later tasks."""
        for rank in self._workers:
            self._post.send(rank, kind, head, body)

    def progress(self) -> bool:
        """Take the results that have arrived, and hand out tasks. Return whether a result arrived."""
        if self._post.closed:
            return False
        with self.lock:
            arrived = False
            while (letter := self._post.receive()) is not None:
                self._take(letter)
                arrived = True
            while self.freed:
                key = self.freed.popleft()
                for rank in self._workers:
                    self._post.send(rank, "free", (key,))
            if arrived:  # also if nothing is queued: the next task finds a free worker
                self._busy = False
            if self._queue and not self._busy:
                self._hand_out()
                self._busy = bool(self._queue)
        self._tell_owners()
        return arrived

    def _tell_owners(self) -> None:
        """Tell the owners of tasks that have ended, without the lock: they may hold locks of their own."""
        while self._ended:
            try:
                task, value, error = self._ended.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                task.ended(value, error)
            finally:
                with self.lock:
                    self._open[id(task.owner)] -= 1
                    if not self._open[id(task.owner)]:
                        del self._open[id(task.owner)]

    def wait(self, until: Callable[[], bool]) -> None:
        """Make progress until a condition holds.

        Raises
        ------
        RuntimeError
            If the workers have been let go, so that it never holds.
        """
        backoff = Backoff()
        while not until():
            self._post.require_open()
            if self.progress():
                backoff.reset()
            elif not until():
                backoff.pause()

    def cancel_queued(self, owner: object, error: Callable[[], BaseException]) -> None:
        """End the tasks of an owner that no worker has begun, with an error."""
        with self.lock:
            waiting, self._queue = self._queue, deque()
            self._cancelling[id(owner)] = error
            for task in waiting:
                self._queue_again(task, self._queue.append)
            for worker in self._workers.values():
                if len(worker.tasks) > 1 and not worker.dropping:
                    worker.dropping = True
                    self._post.send(worker.rank, "drop")
        try:
            self.wait(lambda: not any(worker.dropping for worker in self._workers.values()))
        finally:
            del self._cancelling[id(owner)]
        self._tell_owners()

    def _queue_again(self, task: Task, queue: Callable[[Task], None]) -> None:
        """Queue a task that was not begun, unless its owner cancels its tasks."""
        error = self._cancelling.get(id(task.owner))
        if error is None:
            queue(task)
        else:
            self._ended.append((task, None, error()))

    def _take(self, letter: Letter) -> None:
        worker = self._workers[letter.source]
        if letter.kind == "dropped":
            worker.dropping = False
            for number in reversed(letter.head):
                self._queue_again(worker.tasks.pop(number), self._queue.appendleft)
            return
        number, seconds = letter.head
        task = worker.tasks.pop(number)
        worker.quick = seconds < _QUICK
        value: Any = None
        error: BaseException | None = None
        try:
            value = unpack(letter.body)
        except Exception as raised:  # a class that the coordinator cannot rebuild
            error = raised
        if letter.kind == "failed" and error is None:
            value, error = None, value.error()
        self._ended.append((task, value, error))

    def _hand_out(self) -> None:
        for most in (1, 2):
            for worker in self._workers.values():
                has = len(worker.tasks)
                if has >= most or (has and not worker.quick) or worker.dropping:
                    continue
                if not self._hand_to(worker):
                    return

    def _hand_to(self, worker: _Worker) -> bool:
        """Hand the next task to a worker. Return whether there was one."""
        while self._queue:
            task = self._queue.popleft()
            if task.began is not None and not task.began():
                self._ended.append((task, None, None))
                continue
            self._contact.functions.send(worker.rank, task.function)
            task.number = next(self._numbers)
            worker.tasks[task.number] = task
            self._post.send(
                worker.rank, "task", (task.number, task.function.digest, task.strategy), task.arguments
            )
            return True
        return False


_dispatchers: dict[int, Dispatcher] = {}


def dispatcher_of(contact: Contact) -> Dispatcher:
    """Return the dispatcher of a contact. There is one, which all coordinators and executors share."""
    return _dispatchers.setdefault(id(contact.post), Dispatcher(contact))
