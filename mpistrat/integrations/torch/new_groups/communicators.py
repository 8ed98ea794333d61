"""The communicators of process groups: of a new group, made by its members alone, and of a part of a group."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.distributed.constants import default_pg_timeout

from mpistrat.collectives import structures
from mpistrat.collectives.movement import gather
from mpistrat.integrations.torch.new_groups import meeting
from mpistrat.integrations.torch.tensors import require
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.runtime.process import launch, mpi
from mpistrat.runtime.topology import Topology

_PATIENCE = 30.0  # seconds in which the members of a new group must come, if the program gives no timeout
_OWN_STORES = ("FileStore", "HashStore")  # that a program makes itself
_alone = False  # whether the program has begun with a group of this rank alone
_OUTSIDE = -1  # the place of a rank in a part that it does not belong to


def all_ranks() -> Any:
    """Return the communicator of all ranks, and start MPI if needed.

    Raises
    ------
    RuntimeError
        If a rank made this process by ``torch.multiprocessing``. Open MPI ends such a process by a segmentation fault.
    """
    if _is_made_by_multiprocessing() and not mpi.running() and launch.started_tasks(os.environ):
        raise RuntimeError(
            "MPI does not know this process, which a rank made by multiprocessing: call the function itself instead "
            "of mp.spawn, and start the program by `mpistrat run -n RANKS`, mpirun or srun; for workers that import "
            'the program again, begin groups below `if __name__ == "__main__":`'
        )
    return mpi.start().COMM_WORLD


def _is_made_by_multiprocessing() -> bool:
    # While a spawned process imports the program again it has this mark, and its parent is not set yet.
    imports = getattr(multiprocessing.current_process(), "_inheriting", False)
    return multiprocessing.parent_process() is not None or imports


def communicator(described: Any) -> Any:
    """Return the communicator of a process group: that of all ranks, of this rank alone, or a new one.

    Parameters
    ----------
    described : torch.distributed._DistributedBackendOptions
        What torch believes: ``global_ranks_in_group`` (the members in ``MPI.COMM_WORLD``; empty for all ranks),
        ``group_rank``, ``group_size``, ``timeout``, and the ``store`` that all members know.

    Raises
    ------
    RuntimeError
        If MPI has other ranks than torch. If a member makes a group of other ranks (`MismatchError`), comes too late,
        has ended its program, or makes another attempt at the group.
    """
    world = all_ranks()
    ranks, group_rank, size = (
        list(described.global_ranks_in_group),
        described.group_rank,
        described.group_size,
    )
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
        meeting.prepare(world)
        return world
    given = described.timeout
    seconds = _PATIENCE if given == default_pg_timeout else given.total_seconds()
    return meeting.communicator_of(ranks, described.group_id, described.store, seconds)


def _begins_alone(ranks: list[int], store: Any) -> bool:
    """Return whether a group of one rank is what the program means: it has made a store for that.

    WORLD_SIZE=1 in the environment does not say that: each rank of a job would train alone, and say nothing.
    """
    global _alone
    if not ranks:
        while hasattr(store, "underlying_store"):  # torch puts prefixes before it
            store = store.underlying_store
        _alone = type(store).__name__ in _OWN_STORES
    return _alone


def part_of(comm: Any, topology: Topology, ranks: Sequence[int]) -> Any | None:
    """Return a communicator of some ranks of another one; None on other ranks. Collective over the other one.

    Raises
    ------
    MismatchError
        If members of a part give different ranks. All ranks raise.
    """
    with structures.refusals("split_group", topology):
        strange = [rank for rank in ranks if not 0 <= rank < topology.size]
        require(
            not strange and len(set(ranks)) == len(ranks), f"split_group: {ranks} of {topology.size} ranks"
        )
        places = np.full((1, topology.size), _OUTSIDE)
        places[0, list(ranks)] = range(len(ranks))
    rows = gather.all_gather(topology, places, 0)
    given = [row.tobytes() for row in rows]
    first_givers: dict[bytes, int] = {}
    for rank, part in enumerate(given):
        if rows[rank, rank] != _OUTSIDE:
            first_givers.setdefault(part, rank)
    for part, rank in first_givers.items():
        members = np.flatnonzero(rows[rank] != _OUTSIDE).tolist()
        others = [member for member in members if given[member] != part]
        if others:
            raise MismatchError(
                f"rank {topology.rank}: split_group: rank {rank} makes a part of ranks {members}, and rank "
                f"{others[0]} another one: all members must give the same ranks in the same order"
            )
    place = int(rows[topology.rank, topology.rank])
    outside = place == _OUTSIDE
    MPI = mpi.start()
    part = comm.Split(MPI.UNDEFINED if outside else min(ranks), 0 if outside else place)
    return None if outside else part
