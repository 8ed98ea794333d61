"""The first contact between the coordinator and the ranks that serve it, and the last.

Neither side may wait for ever for the other. So they exchange a few small messages on the communicator of all ranks,
which can be polled with a limit, before the first collective.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from mpistrat.cluster_resolver import ClusterResolver
from mpistrat.cluster_resolver.compare import agreed_roles
from mpistrat.cluster_resolver.roles import CHIEF, WORKER, Roles
from mpistrat.messages.mailbox import FunctionSender, Mailbox
from mpistrat.process import failure, mpi, program_end
from mpistrat.process.program_end import EndStep
from mpistrat.process.waiting import Backoff
from mpistrat.runtime.environment import rc
from mpistrat.runtime.process_record import creation
from mpistrat.runtime.topology import Topology

_CALL, _PRESENT, _GO = 32101, 32102, 32103  # tags on the communicator of all ranks: used here only


class Contact(NamedTuple):
    """The connection of a rank to the others."""

    mailbox: Mailbox  # messages to and from all ranks of the program
    roles: Roles  # the rank of each task
    functions: FunctionSender  # the functions that other ranks know from this one
    # number of the parameter server, and key, of variables that are not used any more
    freed: deque[tuple[int, int]]
    # ranks whose program goes on: the coordinator, or chief and workers if all of them run the program. At its end
    # each sends "shutdown" to the other ranks, which serve it.
    clients: tuple[int, ...]
    # the other ranks of this node, of which parameter servers publish their variables
    neighbors: frozenset[int] = frozenset()

    @property
    def servers(self) -> set[int]:
        """The ranks that do what a client asks for."""
        return {*range(self.mailbox.size)} - {*self.clients}

    @property
    def role(self) -> str:
        return role_in_words(self.roles, self.mailbox.rank)

    def require_coordinator(self) -> None:
        """End the job if the coordinator is lost."""
        if self.roles.chief in self.mailbox.losses.ranks:
            lost = role_in_words(self.roles, self.roles.chief)
            failure.end_job(f"{self.role}: {lost}, the coordinator, was lost, so the job ends")

    def confirm_shutdown(self, client: int) -> None:
        """Answer the shutdown message of a client."""
        self.mailbox.send(client, "shutdown")
        self.mailbox.flush()


def role_in_words(roles: Roles, rank: int) -> str:
    """Return the rank and its role, such as ``rank 2 (worker 1)``."""
    job, task = roles.task_of(rank)
    return f"rank {rank} ({job} {task})"


_contact: Contact | None = None


def here() -> Contact | None:
    """Return the contact of this rank, if it has one."""
    return _contact


def reach_all(resolver: ClusterResolver, clients: Iterable[str] = (CHIEF,)) -> Contact:
    """Return the contact of the coordinator to all other ranks, which are in `be_reached`. Later calls return the same.

    ``clients`` are the jobs of `Contact.clients`. Raise TimeoutError that names the ranks that do not come within
    ``mpistrat.rc.contact_seconds``, RuntimeError on every rank if they contradict each other about roles, and
    ValueError if roles or clients differ from the first call's.
    """
    jobs = tuple(clients)
    if _contact is not None:
        if _clients(_contact.roles, jobs) != _contact.clients:
            raise ValueError("the program uses the other version's ParameterServerStrategy already: use one of the two")
        return _same(_contact, resolver)
    world = mpi.start().COMM_WORLD
    others = [rank for rank in range(world.size) if rank != world.rank]
    if others and not _called:
        program_end.register(EndStep.SERVERS, _let_go)
        _called.extend(world.isend(None, rank, _CALL) for rank in others)

    def all_present() -> bool:
        _present.update(rank for rank, _ in mpi.messages(world, _PRESENT))
        return len(_present) == len(others)

    if not _poll(all_present, rc.contact_seconds):
        raise TimeoutError(_not_there(resolver, sorted({*others} - _present)))
    # Only when all have answered: what follows is collective, and cannot be left when a rank does not come.
    for rank in others:
        world.send(jobs, rank, _GO)
    program_end.unregister(EndStep.SERVERS, _let_go)
    return _meet(world, resolver, jobs)


def _meet(world: Any, resolver: ClusterResolver, jobs: tuple[str, ...]) -> Contact:
    """Make the contact, once all ranks are there. Collective."""
    global _contact
    with creation(world, "the first contact"):
        comm = world.Dup()
    topology = Topology.of(comm)
    roles = agreed_roles(resolver, topology)
    mailbox = Mailbox(comm, partial(role_in_words, roles))
    (node,) = (node for node in topology.nodes if mailbox.rank in node)
    neighbors = frozenset(node) - {mailbox.rank}
    _contact = Contact(mailbox, roles, FunctionSender(mailbox), deque(), _clients(roles, jobs), neighbors)
    if mailbox.rank in _contact.clients:
        program_end.register(EndStep.SERVERS, _let_go)
    return _contact


def _clients(roles: Roles, jobs: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(rank for job in jobs for rank in roles.ranks.get(job, ()))


def _same(contact: Contact, resolver: ClusterResolver) -> Contact:
    """Return the contact that was made before, unless the resolver tells other roles."""
    if resolver.tasks() != contact.roles.tasks():
        raise ValueError(
            f"the ranks have other roles already: {contact.roles}; the resolver tells {resolver.tasks()}. Use one "
            "division into roles in a program"
        )
    return contact


_called: list[Any] = []  # requests of the calls to the other ranks
_present: set[int] = set()  # ranks that have answered


def be_reached(resolver: ClusterResolver) -> Contact | None:
    """Wait until the coordinator calls, and return the contact to it; None if the coordinator ends without a call.

    Later calls return the same contact. Raise as `reach_all`.
    """
    if _contact is not None:
        return _same(_contact, resolver)
    world = mpi.start().COMM_WORLD
    any_source, status = mpi.start().ANY_SOURCE, mpi.start().Status()
    if not _poll(lambda: mpi.has_come(world, any_source, _CALL, status), rc.contact_seconds):
        raise TimeoutError(
            f"rank {world.rank}, {resolver.task_type} {resolver.task_id}, waited {rc.contact_seconds:g} s for the "
            "coordinator, which must create a ParameterServerStrategy. Create it earlier, or raise "
            "MPISTRAT_CONTACT_SECONDS"
        )
    coordinator = status.Get_source()
    world.recv(source=coordinator, tag=_CALL)
    world.send(None, coordinator, _PRESENT)
    _poll(lambda: mpi.has_come(world, coordinator, _GO), None)
    clients = world.recv(source=coordinator, tag=_GO)
    return _meet(world, resolver, clients) if clients else None


def _poll(arrived: Callable[[], bool], seconds: float | None) -> bool:
    backoff, start = Backoff(), time.monotonic()
    while not arrived():
        if seconds is not None and time.monotonic() > start + seconds:
            return False
        backoff.pause()
    return True


def _not_there(resolver: ClusterResolver, missing: list[int]) -> str:
    roles: Roles | None = getattr(resolver, "roles", None)
    names = [f"rank {rank}" if roles is None else role_in_words(roles, rank) for rank in missing]
    return (
        f"not in Server.join() after {rc.contact_seconds:g} s: {', '.join(names)}. Each worker and parameter server "
        "has to call mpistrat.Server(...).join(). Raise MPISTRAT_CONTACT_SECONDS if they need longer to start"
    )


def meet_on(comm: Any) -> Contact:
    """Return the contact of a communicator: rank 0 coordinates, others work, a single rank does both. Collective."""
    roles = Roles({CHIEF: (0,), WORKER: tuple(range(1, comm.size)) or (0,)}, "a communicator")
    with creation(comm, "the start of an executor"):
        mailbox = Mailbox(comm.Dup(), partial(role_in_words, roles))
    return Contact(mailbox, roles, FunctionSender(mailbox), deque(), (0,))


def _let_go() -> None:
    """Tell the ranks that serve this one, at the end of its program, that they may end too."""
    if _contact is None:
        world = mpi.start().COMM_WORLD
        for rank in range(world.size):
            if rank != world.rank:
                world.isend((), rank, _GO).Free()
    else:
        end_with(partial(shut_down, _contact))


def end_with(shutdown: Callable[[], None]) -> None:
    """Call ``shutdown`` at the end of the program. If it fails, end the job: the other ranks would wait for ever."""
    try:
        shutdown()
    except RuntimeError as error:
        failure.end_job(f"The job ends without a shutdown of the other ranks: {error}")


def shut_down(contact: Contact) -> None:
    """Tell the ranks that serve this one that no more messages come, and wait until all have answered."""
    mailbox = contact.mailbox
    with mailbox.lock:
        if mailbox.closed:
            return
        servers = contact.servers
        for rank in servers:
            mailbox.send(rank, "shutdown")
        mailbox.closed = True
        backoff = Backoff()
        while servers:  # and take what was under way: a rank cannot end with a message that has not left
            message = mailbox.receive()
            servers -= mailbox.losses.ranks
            if message is None:
                backoff.pause()
            elif message.kind == "shutdown":
                servers.discard(message.source)
        mailbox.flush()
