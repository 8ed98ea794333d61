"""The server of a rank: its task in the cluster, and its work for the coordinator until its shutdown message."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from mpistrat import context, nest
from mpistrat.asynchronous import on_worker
from mpistrat.cluster_resolver import ClusterSpec, SimpleClusterResolver
from mpistrat.cluster_resolver.roles import CHIEF, PARAMETER_SERVER, WORKER
from mpistrat.memory.published import Memory, PublishedMemory
from mpistrat.messages import contact
from mpistrat.messages.contact import Contact
from mpistrat.messages.mailbox import FunctionKeeper, Mailbox, ReceivedMessage
from mpistrat.messages.pickling import failure_of, is_plain, pack, unpack
from mpistrat.process import mpi
from mpistrat.process.waiting import Backoff
from mpistrat.record import flight_record
from mpistrat.record.layout import Phase
from mpistrat.runtime.topology import alone
from mpistrat.strategies.parameter_server import strategy_of
from mpistrat.variables.exactly_once import KeptWrites, NotPreparedError, PreparedWrites
from mpistrat.variables.on_server import ServerVariable, VariableStore

_MAX_TIMER_S = 1e9  # seconds, 30 years: a timer does not take any number
_RETRY_S = 0.001  # seconds until the next attempt, if the function is within a message
_UNLIMITED = nullcontext()
_JOIN_TIMEOUT_S = 1.0  # seconds; after an error the thread may wait for the rest of a message until the job ends
_POLL_S = 0.005  # seconds between looks for messages while a task runs; a look costs about 10 us
_FIRST_POLL_S = 0.02  # seconds until the first look: an idle worker should use less than 2 % of a core


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


def serve(contact: Contact) -> None:
    """Serve the coordinator until its program ends; as a parameter server, serve all ranks that run the program."""
    job, number = contact.roles.task_of(contact.mailbox.rank)
    phase = flight_record.phase(Phase.SERVING)
    with phase, _exit_by_signal(), alone(f"{contact.role} runs a function alone"):
        if job == "ps":
            with _interrupting(lambda: False):
                _serve_variables(contact)
            return
        with on_worker.worker(number) as parts:
            _Worker(contact, parts).serve()


@contextmanager
def _exit_by_signal() -> Iterator[None]:
    """End a process that calls ``os._exit`` in the block by a signal: PRRTE 3 tells other ranks of signals only."""
    if not mpi.survives_losses():
        yield
        return
    serving = True

    def die() -> None:
        if serving:
            os.kill(os.getpid(), signal.SIGKILL)

    flight_record.before_exit(die)
    try:
        yield
    finally:
        serving = False


@contextmanager
def _interrupting(called: Callable[[], bool]) -> Iterator[None]:
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


def _serve_variables(contact: Contact) -> None:
    mailbox, store, backoff = contact.mailbox, VariableStore(_memory_for(contact)), Backoff()
    prepared = PreparedWrites(store)
    clients = {*contact.clients}
    while clients:
        message = mailbox.receive()
        if message is None:
            if contact.roles.chief in clients:  # a chief that has sent its shutdown is not lost
                contact.require_coordinator()
            clients -= mailbox.losses.ranks
            backoff.pause()
            continue
        backoff.reset()
        if message.kind == "shutdown":
            _confirm_shutdown(contact, message)
            clients.discard(message.source)
            store.leave(message.source)
        elif prepared.takes(message.kind):
            prepared.handle(mailbox, message, contact.role)
        else:
            store.handle(mailbox, message, contact.role)


def _memory_for(contact: Contact) -> Memory:
    """Return memory for variables. Ranks of this node that ask for them can read it."""
    servers = {*contact.roles.parameter_servers}
    if contact.neighbors - servers:
        with suppress(OSError):
            return PublishedMemory()
    return Memory()


def _confirm_shutdown(contact: Contact, message: ReceivedMessage) -> None:
    contact.mailbox.send(message.source, "shutdown")
    contact.mailbox.flush()


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
        with self._polling(), _interrupting(lambda: self._called):
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
                    _confirm_shutdown(self._contact, message)
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


@dataclass(frozen=True)
class ServerDef:
    """The definition of a server."""

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str = "grpc"


class Server:
    """A task of the cluster, in this process.

    It opens no port: the ranks of a job reach each other by MPI.

    Parameters
    ----------
    server_or_cluster_def : ClusterSpec, mapping or ServerDef
        The cluster, or the definition of another server.
    job_name : str, optional
        May be left out if the cluster has one job.
    task_index : int, optional
        May be left out if the job has one task.
    protocol : str, optional
        Kept as given; by default "grpc".
    config : object, optional
        Ignored. Accepted for programs written for tf.distribute.
    start : bool
        Ignored: no port is opened.

    Raises
    ------
    TypeError
        If ``server_or_cluster_def`` does not describe a cluster.
    ValueError
        If the job or the task is not given and there are several, or it does not exist.

    Examples
    --------
    >>> server = Server.create_local_server()
    >>> server.server_def.job_name, server.server_def.task_index
    ('localhost', 0)
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: object = None,
        start: bool = True,
    ):
        definition = server_or_cluster_def
        if isinstance(definition, ServerDef):
            cluster = definition.cluster
            job_name = definition.job_name if job_name is None else job_name
            task_index = definition.task_index if task_index is None else task_index
            protocol = definition.protocol if protocol is None else protocol
        elif isinstance(definition, (ClusterSpec, Mapping)):
            cluster = ClusterSpec(definition)
        else:
            raise TypeError(f"a server needs a ClusterSpec, a dict or a ServerDef, not {definition!r}")
        if job_name is None:
            job_name = _only(cluster.jobs, "job_name", "jobs")
        if task_index is None:
            task_index = _only(cluster.task_indices(job_name), "task_index", f"tasks of job {job_name!r}")
        cluster.task_address(job_name, task_index)
        self._definition = ServerDef(cluster, job_name, task_index, protocol or "grpc")

    @staticmethod
    def create_local_server(config: object = None, start: bool = True) -> Server:
        """Return the server of a cluster with one task, this process. The arguments are ignored."""
        return Server({"localhost": ["localhost:0"]}, "localhost", 0)

    @property
    def server_def(self) -> ServerDef:
        """The definition of the server."""
        return self._definition

    @property
    def target(self) -> str:
        """A text that names this rank."""
        return f"mpi://{self._definition.job_name}:{self._definition.task_index}"

    def start(self) -> None:
        """Do nothing: no port is opened."""

    def join(self) -> None:
        """Serve the coordinator as a worker or a parameter server, until its program ends.

        Where all workers run the program (`mpistrat.compat.v1.experimental.ParameterServerStrategy`), parameter
        servers serve them until the last of their programs ends. That cluster may lack a chief.

        Raises
        ------
        RuntimeError
            On the chief, on a worker without chief, on a worker if the workers run the program, and if this rank has
            been in `join` before. On every rank, if the ranks contradict each other about roles.
        TimeoutError
            If no coordinator calls within ``mpistrat.rc.contact_seconds``.
        """
        cluster, job, task = self._definition.cluster, self._definition.job_name, self._definition.task_index
        of_workers = job == PARAMETER_SERVER and WORKER in cluster.jobs
        if job == CHIEF or not (CHIEF in cluster.jobs or of_workers):
            raise RuntimeError(
                f"join() serves a chief, the coordinator, and this is {job} {task} of jobs {cluster.jobs}: call it on "
                "workers and parameter servers of a cluster with a chief"
            )
        if contact.here() is not None:
            raise RuntimeError(
                f"{job} {task} serves the coordinator already, or has done so: call join() once, and not in a function "
                "that a worker runs"
            )
        tasks = sum(cluster.num_tasks(name) for name in cluster.jobs)
        size = mpi.start().COMM_WORLD.size
        if tasks != size:
            raise ValueError(f"the cluster has {tasks} tasks, and the program {size} ranks: start {tasks}")
        reached = contact.be_reached(SimpleClusterResolver(cluster, task_type=job, task_id=task))
        if reached is None:
            return
        if reached.mailbox.rank in reached.clients:
            raise RuntimeError(
                f"{reached.role} is in Server.join(), and the chief uses compat.v1's ParameterServerStrategy: create "
                "that on workers too, which run the program, and call join() on parameter servers only"
            )
        serve(reached)


def _only(choices: list[Any], argument: str, kind: str) -> Any:
    if len(choices) != 1:
        raise ValueError(f"{argument} is needed: there are {len(choices)} {kind}")
    return choices[0]
