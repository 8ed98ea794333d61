"""The tasks of a coordinator: queued, or running on workers.

A task that writes prepares its writes on servers. Once it has ended, these servers commit the writes, or abort them.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mpistrat.asynchronous import on_worker
from mpistrat.asynchronous.statistics import Clock, Statistics, WorkerStatistics
from mpistrat.messages.contact import Contact, role_in_words
from mpistrat.messages.mailbox import Mailbox, ReceivedMessage, SentFunction
from mpistrat.messages.pickling import LostRankError, Packed, RepeatedLossError, unpack
from mpistrat.process import failure
from mpistrat.process.waiting import Backoff
from mpistrat.runtime.environment import rc


@dataclass(eq=False, slots=True)
class Task:
    """One call of a function by any worker, in the scope of the strategy of the number ``strategy``.

    ``owner`` is the coordinator or executor, and ``kept`` lives until the task has ended. ``began()`` is called when a
    worker gets it, and returns False if it was cancelled. ``ended`` gets the result or the error, or neither after a
    cancellation. So many ``ranks`` call the function with their communicator, whose rank 0 returns the result. After
    ``seconds`` the worker raises TimeoutError. ``once`` says whether its writes are kept until its end and applied
    once. A chunk has several ``calls``.
    """

    function: SentFunction
    arguments: Packed
    strategy: int | None
    owner: object
    kept: object
    ended: Callable[[Any, BaseException | None], None]
    began: Callable[[], bool] | None = None
    ranks: int | None = None
    seconds: float | None = None
    once: bool = False
    calls: int = 1
    number: int = field(default=-1, init=False)
    running: list[int] = field(default_factory=list, init=False)  # ranks whose result has not come
    workers: tuple[int, ...] = field(default=(), init=False)
    value: Any = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    failed_at: float | None = field(default=None, init=False)
    losses: int = field(default=0, init=False)  # of workers that had it

    @property
    def light(self) -> bool:
        """Whether it has no large array, whose transfer would last until the coordinator makes progress."""
        return not (self.arguments.buffers or self.function.packed.buffers)

    def assign(self, number: int, ranks: list[int]) -> tuple[Any, ...]:
        """Note which ranks get it. Return the head of their message."""
        self.number, self.running, self.workers = number, ranks, tuple(ranks)
        together = None if self.ranks is None else self.workers
        return number, self.function.digest, self.strategy, together, self.seconds, self.once

    def take(self, rank: int, value: Any, error: BaseException | None) -> bool:
        """Take the result of the first rank, or the first error. Return whether the task has ended on all ranks."""
        self.running.remove(rank)
        if error is not None and self.error is None:
            self.value, self.error, self.failed_at = None, error, time.monotonic()
        elif self.error is None and rank == self.workers[0]:
            self.value = value
        return not self.running


_log = logging.getLogger(__name__)
_MOST_LOSSES = 3  # of workers that had the same task, which is then taken for the cause
_ALL_LOSSES_S = 1.0  # after a loss: by then those that happened with it are known
_SHORT_TASK_S = 0.002  # seconds; a worker whose last task took less gets a second task ahead


class WriteCommits:
    """The tasks whose writes are being committed by parameter servers. ``servers`` are the ranks of these servers."""

    def __init__(self, mailbox: Mailbox, servers: tuple[int, ...]):
        self._mailbox = mailbox
        self._servers = servers
        # By task: its result, and the servers that have not committed.
        self._open: dict[int, tuple[Task, Any, set[int]]] = {}

    def commit(self, task: Task, value: Any, servers: Iterable[int]) -> None:
        """Tell servers, by their index, to commit the writes of a task. `committed` has its result later."""
        ranks = [self._servers[index] for index in servers]
        self._send(ranks, "commit", task.number)
        self._open[task.number] = task, value, {*ranks}

    def abort(self, number: int, servers: Iterable[int] | None = None) -> None:
        """Tell servers, by their index, to forget the writes of a task; by default all of them."""
        ranks = self._servers if servers is None else [self._servers[index] for index in servers]
        self._send(ranks, "abort", number)

    def committed(self, message: ReceivedMessage) -> tuple[Task, Any, BaseException | None] | None:
        """Note that a server has committed a task. Return task, value and error when all servers have, else None."""
        (number,) = message.head
        task, value, missing = self._open[number]
        missing.discard(message.source)
        if message.body.stream:
            task.error = task.error or unpack(message.body).error()
        if missing:
            return None
        del self._open[number]
        error, task.error = task.error, None
        return task, value, error

    def _send(self, ranks: Iterable[int], kind: str, number: int) -> None:
        for rank in ranks:
            self._mailbox.send(rank, kind, (number,))


@dataclass(eq=False, slots=True)
class _Worker:
    """A worker as the coordinator sees it: its tasks, and how many it has ended."""

    rank: int
    tasks: dict[int, Task] = field(default_factory=dict)
    quick: bool = False
    dropping: bool = False
    deciding: bool = False  # whether servers still apply the writes of its last task, which its next task may read
    lost: bool = False
    since: float = 0.0  # when it got the task that it runs
    ended: int = 0
    failed: int = 0
    busy: float = 0.0

    @property
    def idle(self) -> bool:
        """Whether it may get a task of any kind."""
        return not (self.tasks or self.dropping or self.deciding)


class Dispatcher:
    """The tasks of a coordinator: queued, and handed to idle workers.

    All calls make progress. A worker whose last task was short gets a second one ahead, which is taken back for an idle
    worker if the first takes long after all. Tasks of a lost worker go to the front of the queue; a lost parameter
    server raises.
    """

    def __init__(self, contact: Contact):
        self._contact = contact
        self._mailbox = contact.mailbox
        self._queue: deque[Task] = deque()
        self._workers = {rank: _Worker(rank) for rank in contact.roles.workers}  # those that are not lost
        self._all = tuple(self._workers.values())
        self._losses = 0  # how many lost ranks have been dealt with
        self._lost_at = 0.0
        self._ahead: set[_Worker] = set()  # workers with two tasks
        self._numbers = itertools.count()
        self._busy = False  # whether no worker can take a task before a result arrives
        self._open: Counter[int] = Counter()
        self._cancelling: dict[int, Callable[[], BaseException]] = {}  # by owner
        self._ended: deque[Task] = deque()
        self._notifying: set[int] = set()  # threads that call `Task.ended` of owners
        self._commits = WriteCommits(contact.mailbox, contact.roles.parameter_servers)
        self._failed: list[Task] = []  # tasks of several ranks of which some have failed and some run
        self._clock = Clock()
        self.lock = contact.mailbox.lock
        self.freed: deque[int] = deque()

    @property
    def queued(self) -> int:
        return len(self._queue)

    def unfinished(self, owner: object) -> int:
        return self._open.get(id(owner), 0)

    def statistics(self) -> Statistics:
        with self.lock:
            workers = tuple(WorkerStatistics(w.rank, w.ended, w.failed, w.busy, w.lost) for w in self._all)
            tasks = {task.number: task.calls for worker in self._workers.values() for task in worker.tasks.values()}
            running, waiting = sum(tasks.values()), sum(task.calls for task in self._queue)
            ended = sum(worker.ended for worker in workers)
            seconds = self._clock.seconds(bool(running or self._queue))
            return Statistics(waiting, running, ended, seconds, workers)

    def add(self, task: Task) -> None:
        with self.lock:
            self._clock.start()
            self._open[id(task.owner)] += 1
            self._queue.append(task)
        # `Task.ended` may add a task. Notifying other owners from inside it could recurse without an end.
        if threading.get_ident() in self._notifying:
            self._advance()
        else:
            self.progress()

    def send_to_workers(self, kind: str, head: tuple[Any, ...], body: Packed) -> None:
        """Send a message to every worker, which acts on it before later tasks."""
        for rank in self._workers:
            self._mailbox.send(rank, kind, head, body)

    def progress(self) -> bool:
        """Take results and hand out tasks. Return whether one came. Raise LostRankError for a lost parameter server."""
        arrived = self._advance()
        self._notify_owners()
        return arrived

    def _advance(self) -> bool:
        """Do as `progress`, but notify no owner."""
        if self._mailbox.closed:
            return False
        with self.lock:
            if len(self._mailbox.losses.ranks) == self._losses:  # a lost worker must get no part of a task
                self._hand_out_if_free()  # first: a free worker need not wait for a poll
            arrived = False
            while (message := self._mailbox.receive()) is not None:
                self._take(message)
                arrived = True
            if len(self._mailbox.losses.ranks) > self._losses:
                self._take_losses()
            while self.freed:  # destructors of values append to it, in any thread
                key = self.freed.popleft()
                for rank in self._workers:
                    self._mailbox.send(rank, "free", (key,))
            if arrived:  # also if nothing is queued: the next task finds a free worker
                self._busy = False
            self._hand_out_if_free()
            if self._ahead:
                self._take_back()
            if self._failed:
                self._check_failed()
        return arrived

    def _notify_owners(self) -> None:
        """Call `Task.ended` of the tasks that have ended, without the lock: owners may hold locks of their own."""
        thread = threading.get_ident()
        while self._ended:
            try:
                task = self._ended.popleft()
            except IndexError:  # another thread was faster
                return
            nested = thread in self._notifying  # the owner waits for another task
            self._notifying.add(thread)
            try:
                task.ended(task.value, task.error)
            finally:
                if not nested:
                    self._notifying.discard(thread)
                with self.lock:
                    self._open[id(task.owner)] -= 1
                    if not self._open[id(task.owner)]:
                        del self._open[id(task.owner)]

    def wait(self, until: Callable[[], bool]) -> None:
        """Make progress until a condition holds. Raise RuntimeError if the workers are gone, so that it cannot hold."""
        backoff = Backoff()
        while not until():
            self._mailbox.require_open()
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
            for worker in self._ahead:
                self._ask_back(worker)
        try:
            self.wait(lambda: not any(worker.dropping for worker in self._workers.values()))
        finally:
            del self._cancelling[id(owner)]
        self._notify_owners()

    def _queue_again(self, task: Task, queue: Callable[[Task], None]) -> None:
        """Queue a task that was not begun, unless its owner cancels its tasks."""
        error = self._cancelling.get(id(task.owner))
        if error is None:
            queue(task)
        else:
            task.error = error()
            self._ended.append(task)

    # --- messages of workers --------------------------------------------------------------------------------

    def _take_losses(self) -> None:
        """Queue the tasks of lost workers again. Raise LostRankError if a parameter server is lost."""
        lost = self._mailbox.losses.ranks
        for rank in self._contact.roles.parameter_servers:
            if rank in lost:
                raise self._mailbox.losses.error(rank)
        self._losses, self._lost_at = len(lost), time.monotonic()
        for worker in [self._workers.pop(rank) for rank in lost if rank in self._workers]:
            tasks, worker.tasks = [*worker.tasks.values()], {}
            worker.lost, worker.dropping = True, False
            self._ahead.discard(worker)
            _log.warning(
                "%s. Functions that it had: %d. Workers left: %d",
                self._mailbox.losses.error(worker.rank),
                len(tasks),
                len(self._workers),
            )
            for task in reversed(tasks):
                task.losses += 1  # of two, nobody knows which one ran. From now on each runs alone
                if task.ranks is None:
                    if task.once:  # it may be prepared on some servers
                        self._commits.abort(task.number)
                    task.running.remove(worker.rank)
                    if task.losses < _MOST_LOSSES:
                        self._queue_again(task, self._queue.appendleft)
                    else:
                        task.error = RepeatedLossError(
                            f"{task.losses} workers were lost while they had this function, the last one was "
                            f"{role_in_words(self._contact.roles, worker.rank)}. It does not run again: it may be what "
                            "ends them",
                            worker.rank,
                        )
                        self._ended.append(task)
                else:  # Open MPI 5.0 mixes up messages after a communicator was made with a lost rank
                    failure.end_job(
                        f"{self._mailbox.losses.error(worker.rank)}. It ran a function of {task.ranks} ranks, which "
                        "wait for it, so the job ends"
                    )
        self._busy = False

    def _take(self, message: ReceivedMessage) -> None:
        if message.kind == "committed":
            decided = self._commits.committed(message)
            if decided is not None:
                task, value, error = decided
                if task.workers[0] in self._workers:
                    self._workers[task.workers[0]].deciding = False
                self._take_end(task, task.workers[0], value, error)
            return
        worker = self._workers[message.source]
        if message.kind == "dropped":
            worker.dropping = False
            for number in reversed(message.head):
                task = worker.tasks.pop(number)
                task.running.remove(worker.rank)
                self._queue_again(task, self._queue.appendleft)
        else:
            self._take_outcome(worker, message)
        if len(worker.tasks) < 2:
            self._ahead.discard(worker)

    def _take_outcome(self, worker: _Worker, message: ReceivedMessage) -> None:
        number, seconds, servers = message.head
        task = worker.tasks.pop(number)
        worker.quick, worker.since = seconds < _SHORT_TASK_S, time.monotonic()
        worker.ended += task.calls
        worker.busy += seconds
        value: Any = None
        error: BaseException | None = None
        try:
            value = unpack(message.body)
        except Exception as raised:  # a class that the coordinator cannot rebuild
            error = raised
        if message.kind == "failed" and error is None:
            value, error = None, value.error()
        worker.failed += error is not None
        if servers and error is None:
            self._commits.commit(task, value, servers)
            worker.deciding = True
            return
        if servers:
            self._commits.abort(number, servers)
        self._take_end(task, worker.rank, value, error)

    def _take_end(self, task: Task, rank: int, value: Any, error: BaseException | None) -> None:
        if task.take(rank, value, error):
            self._clock.note()
            self._ended.append(task)
            if task.ranks is not None and task.error is not None:
                for member in task.workers:  # MPI has some thousands of communicators: free the call's
                    self._mailbox.send(member, "ended", (task.number,))
        elif error is not None:
            self._failed.append(task)

    def _check_failed(self) -> None:
        """End the job if a task of several ranks has failed on some, and the others still run after a while."""
        self._failed = [task for task in self._failed if task.running]
        for task in self._failed:
            if task.failed_at is not None and time.monotonic() > task.failed_at + rc.contact_seconds:
                names = ", ".join(role_in_words(self._contact.roles, rank) for rank in sorted(task.running))
                cause = getattr(task.error, "__cause__", None)
                failure.end_job(
                    f"{cause}\nA function of {task.ranks} ranks raised this error {rc.contact_seconds:g} s ago, and "
                    f"still runs on {names}. A collective cannot be interrupted, so the job ends. Catch errors in the "
                    "function and tell the other ranks, or raise MPISTRAT_CONTACT_SECONDS"
                )

    # --- tasks to workers ----------------------------------------------------------------------------------

    def _hand_out_if_free(self) -> None:
        if self._queue and not self._busy:
            if self._queue[0].losses and time.monotonic() < self._lost_at + _ALL_LOSSES_S:
                return  # a worker that is dead already would count as the next one that this task has ended
            self._hand_out()
            self._busy = bool(self._queue)

    def _hand_out(self) -> None:
        free = self._free_workers()
        while self._queue:
            task = self._queue[0]
            if not self._workers or (task.ranks is not None and len(self._workers) < len(self._all)):
                self._queue.popleft()
                task.error = self._impossible()
                self._ended.append(task)
                continue
            if task.ranks is None:
                workers = [*itertools.islice(free, 1)]
            else:
                idle = (worker for worker in self._workers.values() if worker.idle)
                workers = [*itertools.islice(idle, task.ranks)]
                if len(workers) < task.ranks:
                    return
            if not workers:
                return
            self._queue.popleft()
            if task.began is not None and not task.began():
                self._ended.append(task)
                free = self._free_workers()
                continue
            self._hand(task, workers)

    def _impossible(self) -> LostRankError:
        lost = [worker.rank for worker in self._all if worker.lost]
        names = ", ".join(role_in_words(self._contact.roles, rank) for rank in lost)
        why = "no worker is left" if not self._workers else "MPI makes no communicator of some ranks after a loss"
        return LostRankError(f"the function cannot run: {why}; lost: {names}. Start the job again", lost[-1])

    def _free_workers(self) -> Iterator[_Worker]:
        """Yield the workers without a task, then those that may be handed one more."""
        for most in (0, 1):
            for worker in self._workers.values():
                if len(worker.tasks) > most or worker.dropping or worker.deciding:
                    continue
                task = self._queue[0]
                if not worker.tasks or (worker.quick and task.light and not task.once and not task.losses):
                    yield worker

    def _hand(self, task: Task, workers: list[_Worker]) -> None:
        head = task.assign(next(self._numbers), [worker.rank for worker in workers])
        for worker in workers:
            if worker.tasks:
                self._ahead.add(worker)
            else:
                worker.since = time.monotonic()
            worker.tasks[task.number] = task
            if task.ranks is not None or task.losses:
                worker.quick = False  # no second task ahead: behind a call of several ranks it would be taken back
            self._contact.functions.send(worker.rank, task.function)
            self._mailbox.send(worker.rank, "task", head, task.arguments)

    def _take_back(self) -> None:
        """Ask for tasks that wait for a long one on their worker, if another worker idles."""
        if not any(worker.idle for worker in self._workers.values()):
            return
        now = time.monotonic()
        for worker in self._ahead:
            if now > worker.since + _SHORT_TASK_S:
                self._ask_back(worker)

    def _ask_back(self, worker: _Worker) -> None:
        if not worker.dropping:
            worker.dropping = True
            self._mailbox.send(worker.rank, "drop")


_dispatchers: dict[int, Dispatcher] = {}


def dispatcher_of(contact: Contact) -> Dispatcher:
    """Return the dispatcher of a contact. There is one, which all coordinators and executors share."""
    return _dispatchers.setdefault(id(contact.mailbox), Dispatcher(contact))


class OneRank:
    """Tasks that run one after the other in the thread that calls `progress`, on copies of functions and arguments."""

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
                value = on_worker.call(unpack(task.function.packed), (*together, *args), kwargs)
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
