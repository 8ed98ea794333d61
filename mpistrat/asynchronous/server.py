"""The server of a rank: its task in the cluster, and the variables that a parameter server holds for the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from mpistrat.asynchronous import worker
from mpistrat.asynchronous.worker import interrupting
from mpistrat.cluster_resolver import ClusterSpec, SimpleClusterResolver
from mpistrat.cluster_resolver.roles import CHIEF, PARAMETER_SERVER, WORKER
from mpistrat.memory.published import Memory, PublishedMemory
from mpistrat.messages import contact
from mpistrat.messages.contact import Contact
from mpistrat.process import mpi
from mpistrat.process.waiting import Backoff
from mpistrat.record import flight_record
from mpistrat.record.layout import Phase
from mpistrat.runtime.topology import alone
from mpistrat.variables.exactly_once import PreparedWrites
from mpistrat.variables.on_server import VariableStore


def serve(contact: Contact) -> None:
    """Serve the coordinator until its program ends; as a parameter server, serve all ranks that run the program."""
    job, number = contact.roles.task_of(contact.mailbox.rank)
    phase = flight_record.phase(Phase.SERVING)
    with phase, _exit_by_signal(), alone(f"{contact.role} runs a function alone"):
        if job == "ps":
            with interrupting(lambda: False):
                _serve_variables(contact)
        else:
            worker.serve(contact, number)


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
            contact.confirm_shutdown(message.source)
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
