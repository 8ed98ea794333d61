"""The communicator of a process group, made by its members alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.runtime.process import mpi

_TAG = 32767  # the largest tag that any MPI library has: of messages on the world that only this file sends
_PATIENCE = 30.0  # seconds in which the neighbours in a new group must come
_NAP = 0.001


def communicator(ranks: Sequence[int], group_rank: int, group_size: int) -> Any:
    """Return the communicator of a process group: that of all ranks, or a new one.

    Parameters
    ----------
    ranks : sequence of int
        Ranks of the members in ``MPI.COMM_WORLD``; empty for all ranks.
    group_rank, group_size : int
        What torch believes.

    Raises
    ------
    RuntimeError
        If MPI has other ranks than torch. If a neighbour makes a group of other ranks (`MismatchError`), or comes too
        late.
    """
    MPI = mpi.start()
    world = MPI.COMM_WORLD
    torch_rank = ranks[group_rank] if ranks else group_rank
    if torch_rank != world.rank or (not ranks and group_size != world.size):
        raise RuntimeError(
            f"torch's rank {torch_rank}{'' if ranks else f' of {group_size}'} is rank {world.rank} of {world.size} in "
            "MPI: start the program by `mpistrat run`, mpirun or srun, not torchrun, and give init_process_group no "
            "rank or world_size"
        )
    if not ranks:
        return world
    _compare_with_neighbours(world, list(ranks), group_rank)
    return world.Create_group(world.group.Incl(list(ranks)), _TAG)


def _compare_with_neighbours(world: Any, ranks: list[int], group_rank: int) -> None:
    """Pass the list of ranks once round the group: ranks with other lists would wait for each other for ever."""
    if len(ranks) == 1:
        return
    after, before = ranks[(group_rank + 1) % len(ranks)], ranks[group_rank - 1]
    request = world.isend(ranks, after, _TAG)
    deadline = time.monotonic() + _PATIENCE
    while not world.iprobe(before, _TAG):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"rank {world.rank}: new group of ranks {ranks}: rank {before} did not make it within "
                f"{_PATIENCE:g} s: all ranks must call new_group with the same ranks, in the same order"
            )
        time.sleep(_NAP)
    theirs = world.recv(source=before, tag=_TAG)
    request.wait()
    if theirs != ranks:
        raise MismatchError(
            f"rank {world.rank}: new group of ranks {ranks}, and rank {before} makes one of ranks {theirs}: all ranks "
            "must call new_group with the same ranks, in the same order"
        )
