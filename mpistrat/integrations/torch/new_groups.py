"""The communicators of process groups: of a new group, created by its members alone, and of a part of a group.

The members agree before MPI creates a group: a member that went on alone would wait for ever. The first member receives
the ranks that the others have given, asks each of them to stay, and sends its decision: all go on, or all raise. A
member that has not promised to stay may leave, after its time limit or if another member has given other ranks.

A program may catch the error and try again, while other members are still in the first attempt. Such a member raises,
too, and its next attempt is in step.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from torch.distributed.constants import default_pg_timeout

from mpistrat.collectives import structures
from mpistrat.collectives.movement import moves
from mpistrat.integrations.torch.tensors import require
from mpistrat.integrations.torch.work import have_ended
from mpistrat.launch import launch
from mpistrat.process import mpi, program_end
from mpistrat.process.program_end import EndStep
from mpistrat.process.waiting import Backoff
from mpistrat.runtime.agreement.operation import MismatchError, ranks_in_words
from mpistrat.runtime.topology import Topology

_TO_FIRST, _FROM_FIRST, _OF_GROUPS = 0, 1, 2  # tags: Open MPI makes a group by messages of its tag
_CHECK_INTERVAL_S = 0.5  # seconds of waiting between looks for members with other ranks, and for ranks that have ended
_comm: Any = None  # of all ranks, for this file alone
_here: dict[int, Attempt] = {}  # by rank: attempts of which this rank is the first member
_staying: dict[int, Attempt] = {}  # by rank: attempts in which the rank has promised to stay
_sent: list[Any] = []  # requests of messages; MPI reads their memory until they are complete
_COMES, _STAYS, _LEAVES = "comes", "stays", "leaves"
_JOIN_TIMEOUT_S = 30.0  # seconds in which the members of a new group must come, if the program gives no timeout
_OWN_STORES = ("FileStore", "HashStore")  # stores that a program creates itself
_alone = False  # whether the program has begun with a group of this rank alone
_OUTSIDE = -1  # the position of a rank that does not belong to a part


class Attempt(NamedTuple):
    """An attempt of a rank to make a group."""

    ranks: tuple[int, ...]
    call: str  # torch's name of the group: the number of the call, or a hash with use_local_synchronization
    era: int  # the number of default groups that were made before
    number: int  # of this attempt, among those at these ranks in the era

    def matches(self, other: Attempt) -> bool:
        """Return whether another rank makes the same attempt.

        Either number may differ: the call's after other ranks have repeated a call without this one, the attempt's
        after ranks have given different lists by mistake.
        """
        same_call = self.call == other.call and self.call.isdecimal()
        return (self.ranks, self.era) == (other.ranks, other.era) and (same_call or self.number == other.number)

    def is_before(self, other: Attempt) -> bool:
        """Return whether this attempt at a group of the same ranks comes before another one."""
        return (self.era, self.number) < (other.era, other.number)


class Attempts:
    """The attempts of this rank."""

    def __init__(self) -> None:
        self._era = 0
        self._last: dict[tuple[int, ...], int] = {}
        self._failed: set[tuple[int, ...]] = set()  # groups whose last attempt failed
        self.repeats = 0  # number of attempts after a failed one, which advanced the number of the call

    def begin_era(self) -> None:
        """Number attempts anew, as torch does with groups when it makes a default group. Called by all ranks."""
        self._era += 1
        self.repeats = 0
        self._last.clear()
        self._failed.clear()

    def begin(self, ranks: tuple[int, ...], call: str) -> Attempt:
        """Return the next attempt at a group."""
        self._last[ranks] = self._last.get(ranks, 0) + 1
        self.repeats += ranks in self._failed and call.isdecimal()
        self._failed.discard(ranks)
        return Attempt(ranks, call, self._era, self._last[ranks])

    def fail(self, attempt: Attempt) -> None:
        """Note that an attempt has failed."""
        self._failed.add(attempt.ranks)

    def count(self, ranks: tuple[int, ...], number: int) -> None:
        """Count the attempts at a group up to a number as made."""
        self._last[ranks] = max(number, self._last.get(ranks, 0))


_attempts = Attempts()


class _Decision(NamedTuple):
    """A message of the first member to another: to stay, why both raise, or neither once the group can be created."""

    attempt: Attempt  # of the other one
    stay: bool = False
    number: int = 0  # of the attempt that creates the group, the same on all members from now on
    error: str = ""
    cause: tuple[int, Attempt] | None = None  # instead of ``error``: a rank that makes another attempt


class _GroupAgreement:
    """A meeting of the members of one group.

    ``name`` is torch's name of the group. ``store`` only tells why members do not come. Its part for the n-th group has
    the same name on all ranks, if all ranks call new_group as torch demands.
    """

    def __init__(self, ranks: tuple[int, ...], name: str, store: Any, seconds: float):
        self._ranks = ranks
        self._first, *self._others = ranks
        self._store = store
        self._seconds = seconds
        self._attempt = _attempts.begin(ranks, name)
        self._cause: tuple[int, Attempt] | None = None  # why it fails: a rank that makes another attempt

    def agree(self) -> None:
        self._store.set(self._key(_comm.rank), json.dumps(self._attempt))
        try:
            if _comm.rank == self._first:
                self._lead()
            else:
                self._follow()
        except RuntimeError as error:
            _attempts.fail(self._attempt)
            raise type(error)(
                f"rank {_comm.rank}: new group of ranks {list(self._ranks)}: {error}: all ranks must call "
                "new_group with the same ranks, in the same order"
            ) from None

    # --- the first member ------------------------------------------------------------

    def _lead(self) -> None:
        asked: dict[int, Attempt] = {}

        def decided() -> bool:
            for rank, (attempt, state) in mpi.messages(_comm, _TO_FIRST):
                _note(rank, attempt, state)
            for rank in self._others:
                theirs = _here.get(rank)
                if theirs is None or theirs == asked.get(rank):
                    continue
                if theirs.matches(self._attempt):
                    self._send(rank, _FROM_FIRST, _Decision(theirs, stay=True))
                    asked[rank] = theirs
                elif theirs.ranks == self._ranks and theirs.is_before(self._attempt):
                    self._dismiss(rank, cause=(self._first, self._attempt))
                else:
                    self._raise_other(rank, theirs)
            return not missing()

        def missing() -> list[int]:
            return [rank for rank in self._others if rank not in asked or _staying.get(rank) != asked[rank]]

        try:
            self._wait_until(decided, missing)
        except BaseException as raised:
            self._send_to_members(error=str(raised) or type(raised).__name__, cause=self._cause)
            raise
        number = max(self._attempt.number, *(attempt.number for attempt in asked.values()))
        self._send_to_members(number=number)
        _attempts.count(self._ranks, number)

    def _send_to_members(self, **decision: Any) -> None:
        """Send a decision to the members that have come, except members in a later attempt."""
        for rank in self._others:
            theirs = _here.get(rank)
            if theirs is None:
                continue
            if theirs.matches(self._attempt):
                self._dismiss(rank, **decision)
            elif theirs.ranks != self._ranks:
                self._dismiss(rank, cause=(self._first, self._attempt))

    def _dismiss(self, rank: int, **decision: Any) -> None:
        attempt = _here.pop(rank)
        _staying.pop(rank, None)
        self._send(rank, _FROM_FIRST, _Decision(attempt, **decision))

    # --- the other members -----------------------------------------------------------

    def _follow(self) -> None:
        stays = False

        def decided() -> bool:
            nonlocal stays
            while mpi.has_come(_comm, self._first, _FROM_FIRST):
                decision = _comm.recv(source=self._first, tag=_FROM_FIRST)
                if decision.attempt != self._attempt:
                    continue  # this rank has left that attempt
                if decision.cause is not None:
                    self._raise_other(*decision.cause)
                if decision.error:
                    raise RuntimeError(decision.error)
                if not decision.stay:
                    _attempts.count(self._ranks, decision.number)
                    return True
                self._send(self._first, _TO_FIRST, (self._attempt, _STAYS))
                stays = True
            return False

        self._send(self._first, _TO_FIRST, (self._attempt, _COMES))
        try:
            self._wait_until(decided, lambda: [self._first], lambda: stays)
        except BaseException:
            self._send(self._first, _TO_FIRST, (self._attempt, _LEAVES))
            raise

    # --- all members -----------------------------------------------------------------

    def _raise_other(self, rank: int, theirs: Attempt) -> NoReturn:
        """Raise because another rank makes a group of other ranks, or a later attempt."""
        self._cause = rank, theirs
        if theirs.ranks != self._ranks:
            if _comm.rank in theirs.ranks:  # their attempt fails too, as this rank is not in it
                _attempts.count(theirs.ranks, theirs.number)
            raise MismatchError(f"rank {rank} makes one of ranks {list(theirs.ranks)}")
        _attempts.count(self._ranks, theirs.number - 1)
        raise RuntimeError(
            f"this is attempt {self._attempt.number} at it, which failed on rank {rank}; that makes attempt "
            f"{theirs.number}"
        )

    def _wait_until(
        self, done: Callable[[], bool], missing: Callable[[], list[int]], stays: Callable[[], bool] = bool
    ) -> None:
        """Wait until ``done()``; ``missing()`` returns the ranks that are waited for.

        ``stays()`` tells whether this rank has promised to wait for the first member.
        """
        start = time.monotonic()
        every = min(_CHECK_INTERVAL_S, self._seconds / 4)
        backoff, next_look = Backoff(), every
        ended: list[int] = []
        while not done():
            waited = time.monotonic() - start
            if waited > next_look:
                if not stays():
                    self._look_for_other_groups()
                gone = [rank for rank in ended if rank in missing()]
                if gone:  # ended before the last look, so its last messages have been read since
                    raise RuntimeError(f"{ranks_in_words(gone)} ended before")
                ended = [rank for rank in missing() if have_ended([rank])]
                next_look = waited + every
            if waited > self._seconds and not stays():
                raise RuntimeError(
                    f"{ranks_in_words(missing())} did not make it within {self._seconds:g} s (`timeout` of new_group "
                    "sets the limit)"
                )
            backoff.pause()

    def _look_for_other_groups(self) -> None:
        for rank in self._ranks:
            if self._store.check([self._key(rank)]):
                ranks, call, era, number = json.loads(self._store.get(self._key(rank)))
                if tuple(ranks) != self._ranks:
                    self._raise_other(rank, Attempt(tuple(ranks), call, era, number))

    def _send(self, rank: int, tag: int, message: Any) -> None:
        _sent[:] = [request for request in _sent if not request.test()[0]]
        _sent.append(_comm.isend(message, rank, tag))

    @staticmethod
    def _key(rank: int) -> str:
        # A rank that repeats an attempt has other names of torch from then on than ranks that do not.
        return f"group that rank {rank} makes, after {_attempts.repeats} repeated attempts"


def _note(rank: int, attempt: Attempt, state: str) -> None:
    """Note the state that a member has sent to this rank, the first one."""
    if state == _COMES:
        _here[rank] = attempt
    elif state == _STAYS:
        _staying[rank] = attempt
    else:
        for attempts in (_here, _staying):
            if attempts.get(rank) == attempt:
                del attempts[rank]


def _read_the_rest() -> None:
    for tag in (_TO_FIRST, _FROM_FIRST):
        deque(mpi.messages(_comm, tag), maxlen=0)


def all_ranks() -> Any:
    """Return the communicator of all ranks, and start MPI if needed.

    Raise RuntimeError if a rank made this process by ``torch.multiprocessing``. Open MPI ends such a process by a
    segmentation fault.
    """
    # While a spawned process imports the program again it has this mark, and its parent is not set yet.
    imports = getattr(multiprocessing.current_process(), "_inheriting", False)
    is_child = imports or multiprocessing.parent_process() is not None
    if is_child and not mpi.running() and launch.started_tasks(os.environ):
        raise RuntimeError(
            "MPI does not know this process, which a rank made by multiprocessing: call the function itself instead "
            "of mp.spawn, and start the program by `mpistrat run -n RANKS`, mpirun or srun; for workers that import "
            'the program again, begin groups below `if __name__ == "__main__":`'
        )
    return mpi.start().COMM_WORLD


def communicator(described: Any) -> Any:
    """Return the communicator of a process group: of all ranks, of this rank alone, or a new one.

    ``described`` is a ``torch.distributed._DistributedBackendOptions``: ``global_ranks_in_group`` (the members in
    ``MPI.COMM_WORLD``; empty for all ranks), ``group_rank``, ``group_size``, ``timeout``, and the ``store`` that all
    members share.

    Raise RuntimeError if MPI has other ranks than torch. Raise it too if a member makes a group of other ranks
    (`MismatchError`), comes too late, has ended its program, or makes another attempt at the group.
    """
    global _comm
    world, ranks = all_ranks(), list(described.global_ranks_in_group)
    group_rank, size = described.group_rank, described.group_size
    if size == 1 and world.size > 1 and _begins_alone(ranks, described.store):
        return mpi.start().COMM_SELF.Dup()
    torch_rank = ranks[group_rank] if ranks else group_rank
    if torch_rank != world.rank or (not ranks and size != world.size):
        raise RuntimeError(
            f"torch's rank {torch_rank}{'' if ranks else f' of {size}'} is rank {world.rank} of {world.size} in "
            "MPI: start the program by `mpistrat run`, mpirun or srun, not torchrun or mp.spawn, and give "
            "init_process_group no rank or world_size"
        )
    if not ranks:
        if _comm is None:
            _comm = world.Dup()
            program_end.register(EndStep.UNREAD, _read_the_rest)
        _attempts.begin_era()
        return world
    timeout = described.timeout
    seconds = _JOIN_TIMEOUT_S if timeout == default_pg_timeout else timeout.total_seconds()
    if len(ranks) > 1:
        _GroupAgreement(tuple(ranks), described.group_id, described.store, seconds).agree()
    return _comm.Create_group(_comm.group.Incl(ranks), _OF_GROUPS)


def _begins_alone(ranks: list[int], store: Any) -> bool:
    """Return whether the program means a group of one rank: then it has created a store for that.

    WORLD_SIZE=1 in the environment is not enough: each rank of a job would silently train alone.
    """
    global _alone
    if not ranks:
        while hasattr(store, "underlying_store"):  # torch puts prefixes before it
            store = store.underlying_store
        _alone = type(store).__name__ in _OWN_STORES
    return _alone


def part_of(comm: Any, topology: Topology, ranks: Sequence[int]) -> Any | None:
    """Return a communicator of some ranks of another one; None on other ranks. Collective over the other one.

    Raise MismatchError on all ranks if members of a part give different ranks.
    """
    with structures.refusals("split_group", topology):
        strange = [rank for rank in ranks if not 0 <= rank < topology.size]
        require(not strange and len(set(ranks)) == len(ranks), f"split_group: {ranks} of {topology.size} ranks")
        positions = np.full((1, topology.size), _OUTSIDE)
        positions[0, list(ranks)] = range(len(ranks))
    rows = moves.all_gather(topology, positions, 0)
    parts = [row.tobytes() for row in rows]
    first_givers: dict[bytes, int] = {}
    for rank, part in enumerate(parts):
        if rows[rank, rank] != _OUTSIDE:
            first_givers.setdefault(part, rank)
    for part, rank in first_givers.items():
        members = np.flatnonzero(rows[rank] != _OUTSIDE).tolist()
        others = [member for member in members if parts[member] != part]
        if others:
            raise MismatchError(
                f"rank {topology.rank}: split_group: rank {rank} makes a part of ranks {members}, and rank "
                f"{others[0]} another one: all members must give the same ranks in the same order"
            )
    position = int(rows[topology.rank, topology.rank])
    outside = position == _OUTSIDE
    MPI = mpi.start()
    part = comm.Split(MPI.UNDEFINED if outside else min(ranks), 0 if outside else position)
    return None if outside else part
