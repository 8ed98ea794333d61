"""The loop of a worker: it runs the functions that the coordinator sends, until its shutdown message."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

from mpistrat import context, nest
from mpistrat.asynchronous import on_worker
from mpistrat.messages.contact import Contact
from mpistrat.messages.mailbox import FunctionKeeper, Mailbox, ReceivedMessage
from mpistrat.messages.pickling import failure_of, is_plain, pack, unpack
from mpistrat.process import mpi
from mpistrat.process.waiting import Backoff
from mpistrat.strategies.parameter_server import strategy_of
from mpistrat.variables.exactly_once import KeptWrites, NotPreparedError
from mpistrat.variables.on_server import ServerVariable

_MAX_TIMER_S = 1e9  # seconds, 30 years: a timer does not take any number
_RETRY_S = 0.001  # seconds until the next attempt, if the function is within a message
_UNLIMITED = nullcontext()
_JOIN_TIMEOUT_S = 1.0  # seconds; after an error the thread may wait for the rest of a message until the job ends
_POLL_S = 0.005  # seconds between looks for messages while a task runs; a look costs about 10 us
_FIRST_POLL_S = 0.02  # seconds until the first look: an idle worker should use less than 2 % of a core


def serve(contact: Contact, number: int) -> None:
    """Run functions as worker ``number`` until the coordinator's shutdown message."""
    with on_worker.worker(number) as parts:
        _Worker(contact, parts).serve()


def time_limit(seconds: float | None, mailbox: Mailbox) -> AbstractContextManager[None]:
    """Raise TimeoutError in the block after some seconds, between two steps of Python, and not within a message.

    Python ignores an error in a destructor or a callback of a weak reference: then it is raised again.
    """
    return _UNLIMITED if seconds is None else _limited(seconds, mailbox)


@contextmanager
def _limited(seconds: float, mailbox: Mailbox) -> Iterator[None]:
    error = TimeoutError(f"the function runs for more than {seconds:g} s, its time limit")

    def interrupt(number: int, frame: FrameType | None) -> None:
        if mailbox.between_messages:
            raise error
        signal.setitimer(signal.ITIMER_REAL, _RETRY_S)

    def ignored(unraisable: Any) -> None:
        if unraisable.exc_value is error:
            signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
        else:
            report(unraisable)

    report, sys.unraisablehook = sys.unraisablehook, ignored
    before: Any = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, _MAX_TIMER_S))
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # also if the limit is met between the two
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = report


@contextmanager
def interrupting(called: Callable[[], bool]) -> Iterator[None]:
    """Let Ctrl-C interrupt a function of the program only, which is ``called``.

    It comes to all ranks. One that failed between two tasks would end the job before the coordinator has written the
    results that it keeps.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if called():
            signal.default_int_handler(number, frame)

    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # a handler of the program stays
    ):
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Worker:
    """A worker: handles messages one after the other, in the order in which they arrive."""

    def __init__(self, contact: Contact, parts: on_worker.WorkerParts):
        self._contact, self._mailbox = contact, contact.mailbox
        self._functions = FunctionKeeper()
        self._messages: deque[ReceivedMessage] = deque()
        self._parts = parts
        self._failed: dict[int, Any] = {}  # communicators of tasks of several ranks that raised here
        self._running: object = None  # message of the task that runs
        self._called = False  # whether its function runs

    def serve(self) -> None:
        with self._polling(), interrupting(lambda: self._called):
            backoff = Backoff()
            while True:
                with self._mailbox.lock:
                    if not self._messages:
                        self._take_message()  # one: a poll for the next takes 3 us, for which this one would wait
                    message = self._messages.popleft() if self._messages else None
                if message is None:
                    backoff.pause()
                    continue
                backoff.reset()
                if message.kind == "shutdown":
                    self._contact.confirm_shutdown(message.source)
                    return
                self._handle(message)

    @contextmanager
    def _polling(self) -> Iterator[None]:
        """Look for messages in a thread while a task runs, so that the task after it can be taken back."""
        MPI = mpi.start()
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._poll, args=(ended,), name="mpistrat-worker", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_JOIN_TIMEOUT_S)

    def _poll(self, ended: threading.Event) -> None:
        seen = None
        with suppress(RuntimeError):  # of an interrupted message: the main thread raises it, too
            while not ended.wait(_POLL_S if seen is not None else _FIRST_POLL_S):
                if self._running is not None and self._running is seen:
                    with self._mailbox.lock:  # the main thread waits: messages stay in order, tasks begin or go back
                        while self._take_message():
                            pass
                seen = self._running

    def _take_message(self) -> bool:
        """Take a message if one has arrived. If it asks for tasks that have not begun, give them back."""
        message = self._mailbox.receive()
        if message is None:
            if self._mailbox.losses.ranks:
                self._contact.require_coordinator()
            return False
        if message.kind in ("drop", "shutdown"):
            tasks = [waiting for waiting in self._messages if waiting.kind == "task"]
            self._messages = deque(waiting for waiting in self._messages if waiting.kind != "task")
            if message.kind == "drop":
                self._mailbox.send(message.source, "dropped", tuple(task.head[0] for task in tasks))
                return True
        self._messages.append(message)
        return True

    def _handle(self, message: ReceivedMessage) -> None:
        if message.kind == "task":
            self._run(message)
        elif message.kind == "function":
            self._functions.keep(message)
        elif message.kind == "part":
            key, digest, strategy = message.head
            with _in_scope(strategy):
                self._parts.make(key, lambda: self._functions.function(message.source, digest)(*unpack(message.body)))
        elif message.kind == "free":
            self._parts.free(message.head[0])
        elif message.kind == "ended":
            comm = self._failed.pop(message.head[0], None)
            if comm is not None and not mpi.survives_losses():  # with a lost rank it cannot be freed
                comm.Free()

    def _run(self, message: ReceivedMessage) -> None:
        number, digest, strategy, together, seconds, once = message.head
        self._running = message
        start = time.perf_counter()
        comm = None
        servers: tuple[int, ...] = ()  # that wait for the decision of the coordinator
        try:
            function = self._functions.function(message.source, digest)
            args, kwargs = unpack(message.body)
            comm = None if together is None else self._mailbox.communicator(together, number)
            if comm is not None:
                args = (comm, *args)
            with _in_scope(strategy), _keeping_writes(strategy, once) as writes:
                with on_worker.call_on(comm), time_limit(seconds, self._mailbox):
                    self._called = True
                    result = on_worker.call(function, args, kwargs)
                    self._called = False
                if comm is not None:
                    result = result if comm.rank == 0 else None
                    comm.Free()  # not yet after an error: another rank may still use it
                body, kind = pack(_without_variables(result))[0], "result"
            servers = () if writes is None else writes.prepare(number)
        except NotPreparedError as error:
            servers = error.servers
            body, kind = pack(failure_of(error.__cause__ or error, self._contact.role))[0], "failed"
        except BaseException as error:  # sys.exit() in a task must not end the worker
            called, self._called = self._called, False
            if isinstance(error, KeyboardInterrupt) and not called:  # a message may be incomplete
                raise
            body, kind = pack(failure_of(error, self._contact.role))[0], "failed"
            if comm:
                self._failed[number] = comm
        self._mailbox.send(message.source, kind, (number, time.perf_counter() - start, servers), body)
        if body.buffers:
            self._mailbox.flush()  # the next task may change the arrays
        self._running = None


def _in_scope(strategy: int | None) -> context.entered:
    return context.entered(*([] if strategy is None else [strategy_of(strategy).extended.cross_replica_mode]))


@contextmanager
def _keeping_writes(strategy: int | None, once: bool) -> Iterator[KeptWrites | None]:
    """Keep the writes of a function that counts once. Yield None for another function."""
    if strategy is None or not once:
        yield None
        return
    servers = strategy_of(strategy).extended.servers
    writes = KeptWrites(servers)
    with servers.kept_by(writes):
        yield writes


def _without_variables(result: Any) -> Any:
    if is_plain(result):
        return result
    return nest.map_structure(lambda leaf: leaf.read_value() if isinstance(leaf, ServerVariable) else leaf, result)
