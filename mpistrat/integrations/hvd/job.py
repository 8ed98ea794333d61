"""The job: its ranks, their places, and its process sets, from `init` on, and what it communicates by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat.collectives import structures
from mpistrat.integrations.hvd.examples import example
from mpistrat.integrations.hvd.process_sets import ProcessSet, communicator
from mpistrat.runtime.topology import Topology

global_process_set = ProcessSet([])
_TAG = 0  # of the creation of communicators, on the communicator of the job
_sets: dict[int, ProcessSet] = {}  # those in use by their numbers, from `init` on: the first is that of all ranks
_made = 0  # process sets since `init`


@example("hvd.is_initialized()", "True")
def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Begin to use the ranks of the job. Collective; further calls do nothing until `shutdown`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        By default all ranks that MPI started.
    process_sets : sequence of ProcessSet, or "dynamic", optional
        Process sets to begin with. They may be added at any time.

    Raises
    ------
    TypeError
        If ``process_sets`` is something else.
    ValueError
        As `add_process_set`.
    """
    global _made
    if _sets:
        return
    given = [] if process_sets is None or process_sets == "dynamic" else [*process_sets]
    for each in given:
        if not isinstance(each, ProcessSet):
            raise TypeError(f'process_sets must be a list of ProcessSet, or "dynamic", not {process_sets!r}')
    own = communicator(comm)
    global_process_set.ranks = list(range(own.size))
    global_process_set.begin(0, own.rank, own)
    _sets[0], _made = global_process_set, 0
    try:
        for each in given:
            add_process_set(each)
    except Exception:
        shutdown()
        raise


def shutdown() -> None:
    """End the use of the ranks. `init` may be called again.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> hvd.shutdown()
    >>> hvd.is_initialized()
    False
    """
    for each in further_sets():
        each.end()
    global_process_set.end()
    _sets.clear()


@example("hvd.is_initialized()", "True")
def is_initialized() -> bool:
    """Return whether `init` was called."""
    return bool(_sets)


def further_sets() -> list[ProcessSet]:
    """Return the process sets in use but the one of all ranks."""
    return [each for number, each in _sets.items() if number]


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Begin to use a process set, and return it. Collective over all ranks.

    Raises
    ------
    ValueError
        On every rank, if the ranks differ, do not exist, or are those of a set in use.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> first = hvd.add_process_set([0])
    >>> float(hvd.allreduce(3.0, op=hvd.Sum, process_set=first)) if first.included() else 3.0
    3.0
    >>> hvd.remove_process_set(first)
    True
    """
    global _made
    ranks = topology()
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    with structures.refusals("add_process_set", ranks):
        if len(set(made.ranks)) < len(made.ranks):
            raise ValueError(f"a process set must have each of its ranks once: {made}")
        if not set(made.ranks) <= set(range(ranks.size)):
            raise ValueError(f"{made} has ranks beyond the {ranks.size} of the job")
        if any(each.ranks == made.ranks for each in further_sets()):
            raise ValueError(f"a process set of these ranks is in use already: {made}")
    structures.agree(ranks, "add_process_set", tuple(made.ranks))
    _made += 1
    comm = None
    if ranks.rank in made.ranks:
        comm = ranks.parent.Create_group(ranks.parent.group.Incl(made.ranks), _TAG)
    made.begin(_made, ranks.rank, comm)
    _sets[_made] = made
    return made


@example("hvd.remove_process_set(hvd.global_process_set)", "False")
def remove_process_set(process_set: ProcessSet) -> bool:
    """End the use of a process set; return False if it is unknown, or that of all ranks. Collective over all ranks."""
    number = process_set.process_set_id
    structures.agree(topology(), "remove_process_set", number)
    if not number or _sets.get(number) is not process_set:
        return False
    del _sets[number]
    process_set.end()
    return True


# --- places --------------------------------------------------------------------------------------------


def topology() -> Topology:
    """Return the topology of all ranks. Raise ValueError before `init`."""
    if not _sets:
        raise ValueError("Horovod's calls work after hvd.init(), which was not called")
    return global_process_set.topology


@example("hvd.rank() < hvd.size()", "True")
def size() -> int:
    """Return the number of ranks."""
    return topology().size


@example("hvd.rank() in range(hvd.size())", "True")
def rank() -> int:
    """Return the number of this rank."""
    return topology().rank


@example("hvd.local_size() <= hvd.size()", "True")
def local_size() -> int:
    """Return the number of ranks on this node: those that share memory."""
    return int(topology().node.size)


@example("hvd.local_rank() in range(hvd.local_size())", "True")
def local_rank() -> int:
    """Return the number of this rank on its node."""
    return int(topology().node.rank)


@example("hvd.cross_size() <= hvd.size()", "True")
def cross_size() -> int:
    """Return the number of nodes that have a rank with this local rank."""
    return int(topology().rail.size)


@example("hvd.cross_rank() in range(hvd.cross_size())", "True")
def cross_rank() -> int:
    """Return the number of this node among those that have a rank with this local rank."""
    return int(topology().rail.rank)


@example("hvd.is_homogeneous()", "True")
def is_homogeneous() -> bool:
    """Return whether all nodes have equally many ranks."""
    return len(set(topology().ranks_per_node)) == 1


@example("hvd.mpi_built(), hvd.nccl_built()", "(True, 0)")
def mpi_built() -> bool:
    """Return True: this library communicates by MPI."""
    return True


mpi_enabled = mpi_built


@example("hvd.mpi_threads_supported()", "False")
def mpi_threads_supported() -> bool:
    """Return False: one thread at a time may communicate."""
    return False


@example("hvd.gloo_built(), hvd.gloo_enabled(), hvd.cuda_built()", "(False, False, False)")
def gloo_built() -> bool:
    """Return False, as the functions for other ways to communicate do."""
    return False


gloo_enabled = ddl_built = ccl_built = cuda_built = rocm_built = gloo_built


@example("hvd.nccl_built()", "0")
def nccl_built() -> int:
    """Return 0: tensors on GPUs go through the memory of the host."""
    return 0
