"""Where the ranks are: world, node, rail and leaders, made once per communicator.

*node*: the ranks that share memory (``MPI_Comm_split_type``, MPI 4.1 section 7.4.2; never host names, which
are equal in containers). *rail*: the ranks with the same local rank, one per node. *leaders*: the rail of
local rank 0.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpistrat.memory.node import NodeMemory, NoSharedMemoryError
from mpistrat.process import debug_notes, failure, mpi, program_end
from mpistrat.process.program_end import EndStep
from mpistrat.record import ring
from mpistrat.runtime import environment, process_record
from mpistrat.runtime.agreement.agreement import Agreement, MpiAgreement, NodeAgreement, TwoTierAgreement
from mpistrat.runtime.agreement.collective_lock import CollectiveLock
from mpistrat.runtime.agreement.operation import MismatchError, operation
from mpistrat.runtime.object_collectives import ObjectCollectives
from mpistrat.runtime.process_record import creation, start_record

if TYPE_CHECKING:
    from mpistrat.record.flight_record import FlightRecord


# --- limits ---------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """The sizes at which collectives change their algorithm, equal on all ranks. The defaults were measured."""

    # the slot of a rank in the memory of its node, with one node. 0: the ranks of a node do not share memory.
    slot_bytes: int = 3 << 20
    # the same with several nodes: large enough to keep the network between them busy
    slot_bytes_between_nodes: int = 4 << 20
    least_slot_bytes: int = 64 << 10  # the smallest slot to try where memory is scarce
    # up to this size a rank always writes to the same place of its slot, which stays in the cache
    same_place_bytes: int = 1 << 20
    # from this size on an array is reduced in its own message: copying it costs more than a message
    alone_bytes: int = 64 << 10
    # the same for broadcasts: MPI libraries that copy directly between processes are then as fast as slots
    broadcast_alone_bytes: int = 32 << 10
    # a message between leaders up to this size takes about as long as an empty message
    with_agreement_bytes: int = 8 << 10
    chunk_bytes: int = 2 << 20  # the largest message that is combined by MPI
    # part of a message on the ring between nodes. Up to 64 KiB, Open MPI's TCP sends eagerly.
    segment_bytes: int = 60 << 10
    exact_ring_bytes: int = 64 << 10  # from this size on exact sums are exchanged on a ring
    # the largest message that is moved without combining; below 2^31, the limit of older MPI libraries
    message_bytes: int = 1 << 30
    # the largest result that one MPI call gathers: its displacements must be below 2^31
    gathered_bytes: int = (1 << 31) - 1

    # a checkpoint up to this size is written by the chief alone: the others would take longer to open the file
    save_alone_bytes: int = 32 << 20

    def slots(self, between_nodes: bool) -> list[int]:
        """Return the slot sizes to try, largest first, in bytes. Equal on all nodes."""
        size = self.slot_bytes_between_nodes if between_nodes else self.slot_bytes
        if not size:
            return []
        sizes = [size]
        while size >= 4 * self.least_slot_bytes:
            size //= 4
            sizes.append(size)
        return sizes


# --- the ranks ------------------------------------------------------------------


_END = operation("the end of the program")
_HOST_BYTES = 64
_keyval: int | None = None

Split = Sequence[Sequence[int]] | Callable[[Any], int]
_at_finalize: int | None = None
_AFTER_FINALIZE = "after MPI.Finalize(): finalize MPI when all strategies are done"
_topologies: weakref.WeakSet[Topology] = weakref.WeakSet()
at_end: list[Callable[[Topology], object]] = []
"""Functions that all ranks of the job call together at its end, with a topology of all of them."""
_Slot = TypeVar("_Slot", bound="Slot")
_log = logging.getLogger(__name__)

_alone = ""  # what this rank does without the others, such as a function that a coordinator sent


@contextlib.contextmanager
def alone(activity: str) -> Iterator[None]:
    """Refuse topologies of several ranks: other ranks would not come to their first collective."""
    global _alone
    before, _alone = _alone, activity
    try:
        yield
    finally:
        _alone = before


class Slot:
    """The base class of objects that other packages keep in a topology: one of each, by ``topology.slot(OwnClass)``."""

    def finish(self) -> None:
        """Wait for this rank's pending work at the end of the program. Must not send messages."""

    def close(self) -> None:
        """Release what the ranks share. Called on all ranks: at the end of the program, and by `Topology.free`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # it belongs to the ranks, which are not copied


class Topology(ObjectCollectives):
    """The ranks of a communicator and where they live.

    Get one by `Topology.of`: all users of one communicator share it, and with it the private communicators.

    Attributes
    ----------
    nodes : tuple of tuple of int
        The ranks of each node, nodes in the order of their first rank.
    hosts : tuple of str
        The name of each rank's host. Only for messages: names of containers may be equal.
    parent, world, node, rail : mpi4py.MPI.Comm
        The communicator this was made for, a private duplicate, and the two tiers, for the package only.
    lock : CollectiveLock
        What a thread holds in a collective of these ranks, and by which they agree on it. See `limited`.
    memory : NodeMemory or None
        What the ranks of this node share; None on all ranks if one node's ranks cannot.
    checks, compares_variables
        The checks that cost time (``rc.debug``).
    verify : frozenset of str
        What the ranks verify in the background (``rc.verify``).
    clocks : tuple of int
        For each rank a number of its monotonic clock, equal where the clock is the same.
    traced : bool
        Whether some of the ranks were traced when this was made.
    """

    __slots__ = ("lock",)  # `limited` shares all else

    limits = Limits()
    memory: NodeMemory | None = None
    checks: frozenset[str] = frozenset()
    verify: frozenset[str] = frozenset()
    compares_variables = False

    def __init__(self, parent: Any, split: Split | None = None, limits: Limits | None = None):
        if limits is not None:
            self.limits = limits
        color = None if split is None else _node_of(parent, split)
        MPI = mpi.start()
        with creation(parent, "the start of a communicator") as record:
            self._create(parent, color, record, MPI)

    def _create(self, parent: Any, color: int | None, record: FlightRecord | None, MPI: Any) -> None:
        environment.agree(parent)
        self.checks, self.verify = environment.rc.debug, environment.rc.verify
        self.compares_variables = "variables" in self.checks
        self.parent = parent
        self.world = world = parent.Dup()
        self.size: int = world.size
        self.rank: int = world.rank
        if color is None:
            self.node = world.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        else:
            self.node = world.Split(color, key=self.rank)
        self.rail = world.Split(self.node.rank, key=self.rank)
        # The leader of each rank's node, a random number, the clock, and the host. The number of rank 0 names the
        # communicator in flight records.
        host = socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0")
        facts = self.node.bcast(self.rank), _random_number(), ring.clock_number(), ring.ring is not None
        row = np.array([*facts, *np.frombuffer(host, np.int64)])
        of_ranks = np.empty((self.size, len(row)), np.int64)
        world.Allgather(row, of_ranks)
        leader_of = of_ranks[:, 0]
        self.hosts = tuple(name.tobytes().rstrip(b"\0").decode(errors="replace") for name in of_ranks[:, len(facts) :])
        self.clocks, self.traced = tuple(of_ranks[:, 2].tolist()), bool(of_ranks[:, 3].any())
        self.nodes = tuple(
            tuple(np.flatnonzero(leader_of == leader).tolist()) for leader in sorted(set(leader_of.tolist()))
        )
        self._slots: dict[type[Slot], Slot] = {}
        agreement: Agreement | None = None
        if self.size > 1:
            self.memory = self._share_memory(MPI)
            agreement = self._new_agreement()
        flight = None if record is None else record.of(int(of_ranks[0, 1]), self.size, self.rank)
        compares_lines = "collectives" in self.checks
        self.lock = CollectiveLock(self.rank, self.size, world, agreement, flight, compares_lines)
        if self.traced:
            self.compare_clocks()

    @classmethod
    def of(cls, comm: Any, *, split: Split | None = None, limits: Limits | None = None) -> Topology:
        """Return the topology of a communicator. Collective over it when called for the first time.

        ``split`` says how ranks are grouped into nodes, by default by shared memory: the ranks of each node, or
        ``split(comm)``, a number for each node. Raise TypeError if ``comm`` is not an intra-communicator of mpi4py.
        Raise ValueError for the null communicator, for groups without each rank once, if ``split`` or ``limits`` comes
        after the first call, and on every rank if an option of ``mpistrat.rc`` cannot be read or differs. Raise
        RuntimeError in `alone` if there are several ranks.
        """
        MPI = mpi.start()
        if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
            raise ValueError("the communicator is COMM_NULL on this rank: only its members may create the strategy")
        if not isinstance(comm, MPI.Intracomm):
            raise TypeError(f"comm must be an intra-communicator of mpi4py, not {comm!r}")
        if _alone and comm.size > 1:
            raise RuntimeError(f"{_alone}, and a strategy of {comm.size} ranks needs all: use comm=MPI.COMM_SELF")
        global _keyval, _at_finalize
        if _keyval is None or _at_finalize is None:
            _keyval = MPI.Comm.Create_keyval(delete_fn=_delete)
            # MPI_Finalize begins with the attributes of this communicator (MPI 4.1, section 11.2.4).
            _at_finalize = MPI.Comm.Create_keyval(delete_fn=_refuse_after_finalize)
            MPI.COMM_SELF.Set_attr(_at_finalize, None)
        topology = comm.Get_attr(_keyval)
        if topology is None:
            topology = cls(comm, split, limits)
            comm.Set_attr(_keyval, topology)
            _topologies.add(topology)
            topology._greet(MPI)
        elif split is not None or limits is not None:
            raise ValueError("split and limits are for a communicator without a topology: this one has one")
        return topology

    def _greet(self, MPI: Any) -> None:
        if MPI.COMM_WORLD.size == 1:
            return
        if MPI.Comm.Compare(self.parent, MPI.COMM_WORLD) in (MPI.IDENT, MPI.CONGRUENT):
            failure.share(self.node)
        if mpi.survives_losses():  # some ranks may be lost at the end: do not wait for them
            for comm in (self.world, self.node, self.rail):
                failure.revoke_at_end(comm)
        elif self.size > 1:
            program_end.register(EndStep.GOODBYES, self._announce_end)
            debug_notes.note(self.checks)

    def _share_memory(self, MPI: Any) -> NodeMemory | None:
        between_nodes = len(self.nodes) > 1
        problem: NoSharedMemoryError | None = None
        for slot_bytes in self.limits.slots(between_nodes):
            memory = problem = None
            try:
                memory = NodeMemory(self.node, slot_bytes, between_nodes, self.limits.same_place_bytes)
            except NoSharedMemoryError as error:
                problem = error
            if self.world.allreduce(memory is not None, MPI.LAND):
                return memory
        if problem is not None and self.node.rank == 0:
            _log.warning("%s; collectives go without it and are slower", problem)
        return None

    def _new_agreement(self) -> Agreement:
        if self.memory is None:
            return MpiAgreement(self.world)
        if len(self.nodes) == 1:
            return NodeAgreement(self.memory)
        return TwoTierAgreement(self.memory, self.leaders)

    def limited(self, timeout_seconds: float | None) -> Topology:
        """Return the same ranks and lock with another default limit of collectives; None for no limit."""
        if timeout_seconds == self.lock.timeout_seconds:
            return self
        other = object.__new__(type(self))
        other.__dict__ = self.__dict__
        other.lock = self.lock.limited(timeout_seconds)
        return other

    @property
    def node_memory(self) -> NodeMemory:
        """The shared memory of this node: `memory`, where it is not None."""
        assert self.memory is not None
        return self.memory

    @property
    def shares_all(self) -> bool:
        """Whether all ranks are on one node and share memory."""
        return self.memory is not None and len(self.nodes) == 1

    @property
    def leaders(self) -> Any:
        """The communicator of the nodes' first ranks, None on all other ranks."""
        return self.rail if self.node.rank == 0 else None

    @property
    def ranks_per_node(self) -> tuple[int, ...]:
        return tuple(len(ranks) for ranks in self.nodes)

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the index of a rank's node, and the index of the rank on it."""
        node = next(i for i, ranks in enumerate(self.nodes) if rank in ranks)
        return node, self.nodes[node].index(rank)

    def compare_clocks(self) -> None:
        """Note in the trace how far the clocks of the ranks differ. Collective if there are several."""
        sample = ring.measure_clocks(self.world, self.clocks)
        if ring.ring is not None:
            ring.ring.sample(sample)

    def _announce_end(self) -> None:
        """Tell ranks that still wait in a collective that this rank's program has ended."""
        if not self.world:
            return
        if not self.lock.left:
            for slot in self._slots.values():
                slot.finish()
        while True:
            try:
                self.lock.reopen()  # other ranks may still wait for this one, without a limit, or for its report
                self.lock.compare(_END)
                if self.size == mpi.start().COMM_WORLD.size:
                    if self.checks & {"output", "random"}:
                        debug_notes.report(self.world)
                    while at_end:
                        at_end.pop()(self)
                self._close_slots()
                if self.traced:
                    self.compare_clocks()
                return
            except MismatchError:
                continue
            except RuntimeError:  # a thread is still in a collective, or this rank left one in the middle
                if self.lock.left:
                    failure.end_job(f"{self.lock.left}, and its program is at its end: the others would wait for ever")
                return

    def __deepcopy__(self, memo: dict[int, Any]) -> Topology:
        return self  # there is one for each communicator

    def free(self) -> None:
        """Give the private communicators back. Collective."""
        program_end.unregister(EndStep.GOODBYES, self._announce_end)
        # Before the memory of the node is touched, which others may still read.
        self.lock.close("on a communicator that was freed: make a strategy on one that is not")
        self.memory = None
        self._close_slots()
        for comm in (self.rail, self.node, self.world):
            comm.Free()

    def slot(self, kind: type[_Slot]) -> _Slot:
        """Return the object that a package above keeps for these ranks, made at its first use."""
        slot = self._slots.get(kind)
        if slot is None:
            slot = self._slots[kind] = kind()
        return slot  # type: ignore[return-value]  # of that class

    def _close_slots(self) -> None:
        for slot in self._slots.values():
            slot.close()

    def __repr__(self) -> str:
        return f"<Topology: rank {self.rank} of {self.size} on {len(self.nodes)} node(s)>"


class SingleRankTopology(Topology):
    """One replica that needs no MPI: `parent` starts it if it is asked for."""

    def __init__(self) -> None:
        self.size, self.rank, self.nodes, self.hosts = 1, 0, ((0,),), ("",)
        self.clocks, self.traced = (0,), False
        self._slots = {}
        record = start_record(0, 1)
        flight = None if record is None else record.of(_random_number(), 1, 0)
        self.lock = CollectiveLock(0, 1, flight=flight)

    def __getattr__(self, name: str) -> Any:
        if name in ("parent", "world", "node", "rail"):
            return mpi.start().COMM_SELF
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def several() -> list[Topology]:
    return [topology for topology in list(_topologies) if topology.size > 1]


def of_all_ranks() -> Topology | None:
    """Return a topology of all ranks of the job, the same on each of them; None if there is not exactly one."""
    if not mpi.running():
        return None
    size = mpi.start().COMM_WORLD.size
    topologies = [topology for topology in _topologies if topology.size == size and not topology.lock.given_up]
    return topologies[0] if len(topologies) == 1 else None


def _random_number() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 2 | 1  # a positive int64


def _node_of(comm: Any, split: Split) -> int:
    if callable(split):
        return split(comm)
    nodes = [list(ranks) for ranks in split]
    if sorted(itertools.chain(*nodes)) != list(range(comm.size)):
        raise ValueError(f"split must have each of {comm.size} ranks once, not {nodes}")
    return next(i for i, ranks in enumerate(nodes) if comm.rank in ranks)


def _delete(comm: Any, keyval: int, topology: Topology) -> None:
    """Free the topology of a communicator that the program frees. MPI calls this on all ranks of it."""
    if mpi.running():
        MPI = mpi.start()
        if comm not in (MPI.COMM_WORLD, MPI.COMM_SELF):
            topology.free()


class _Finalized:
    """A stand-in for a communicator after MPI.Finalize(), where the MPI library would end the process."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} {_AFTER_FINALIZE}")


def _refuse_after_finalize(comm: Any, keyval: int, value: None) -> None:
    _refuse_all(_AFTER_FINALIZE)
    for topology in list(_topologies):
        topology.world = topology.node = topology.rail = _Finalized()
    process_record.finish()


def _refuse_all(why: str) -> None:
    """Refuse the collectives of all topologies, later ones too."""
    CollectiveLock.refuse_new(why)
    for topology in list(_topologies):
        topology.lock.refuse(why)


# A forked process would take the place of its parent in barriers and memory.
_IN_CHILD = "in a forked process: only those that MPI started may communicate"
os.register_at_fork(after_in_child=partial(_refuse_all, _IN_CHILD))
