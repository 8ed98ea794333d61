"""The job from `init` to `shutdown`: its ranks and nodes, its process sets, and how it communicates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mpistrat import absent
from mpistrat.collectives import CollectiveAllReduce, CrossDeviceOps, structures
from mpistrat.process import mpi
from mpistrat.runtime.process_record import creation
from mpistrat.runtime.topology import Topology
from mpistrat.verify import watch

__all__ = [
    "ProcessSet",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
]

_keyval: int | None = None
_Function = TypeVar("_Function", bound=Callable[..., Any])


class ProcessSet:
    """Ranks that make collectives without the others. Give it to `init` or `add_process_set` before use.

    Parameters
    ----------
    ranks : sequence of int
        Numbers of ranks, as `rank` returns them.

    Attributes
    ----------
    process_set_id : int or None
        The number of the set; None before it is added and after it is removed.
    ranks : list of int

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.init()
    >>> first = hvd.add_process_set([0])
    >>> first.included(), first.size()
    (True, 1)
    >>> hvd.remove_process_set(first)
    True
    """

    def __init__(self, ranks: Sequence[int]):
        if not all(isinstance(number, int | np.integer) for number in ranks):
            raise ValueError(f"a ProcessSet is made of the numbers of ranks, not {ranks!r}")
        self.ranks = sorted(map(int, ranks))
        self.process_set_id: int | None = None
        self._topology: Topology | None = None
        self._ops: CrossDeviceOps | None = None

    def begin(self, number: int, own_rank: int, comm: Any) -> None:
        """Begin to use a communicator; None on ranks outside of the set. Collective over the set."""
        self.process_set_id, self._own_rank = number, own_rank
        if comm is not None:
            self._topology = Topology.of(comm)
            watch(self._topology)
            self._ops = CollectiveAllReduce().bound_to(self._topology)

    def end(self) -> None:
        """Forget the communicator, and free it unless it has all ranks. Collective over the set."""
        if self._topology is not None and self.process_set_id:  # set 0 keeps the duplicate for the next `init`
            self._topology.parent.Free()  # and with it the topology
        self.process_set_id = self._topology = self._ops = None

    @property
    def topology(self) -> Topology:
        """The topology of the set. Raise ValueError if the set is not in use, or this rank is not in it."""
        if self.process_set_id is None:
            raise ValueError(f"{self} is not in use: call hvd.init(), or hvd.add_process_set(...) first")
        if self._topology is None:
            raise ValueError(f"rank {self._own_rank} is not in {self}")
        return self._topology

    @property
    def ops(self) -> CrossDeviceOps:
        """The cross-device ops of the set. This rank must be in it."""
        ops = self._ops
        assert ops is not None
        return ops

    def size(self) -> int | None:
        """Return the number of ranks of the set; None if it is not in use."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the rank in this set; None if it is not in use."""
        return None if self.process_set_id is None else self.topology.rank

    def included(self) -> bool | None:
        """Return whether this rank is in the set; None if it is not in use."""
        return None if self.process_set_id is None else self._topology is not None

    def place_of(self, root_rank: int) -> int:
        """Return the rank in this set of a rank of the job. Raise ValueError if it is not in the set."""
        if root_rank not in self.ranks:
            raise ValueError(f"root_rank {root_rank} is not in {self}")
        return self.ranks.index(root_rank)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


def communicator(comm: Any) -> Any:
    """Return the communicator of a job: a duplicate of ``comm``, by default of all ranks.

    The first call for a communicator is collective. Further calls return the same duplicate. Raise TypeError if
    ``comm`` is not a communicator.
    """
    MPI = mpi.start()
    if comm is None:
        comm = MPI.COMM_WORLD
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm must be an intra-communicator of mpi4py, not {comm!r}: for some ranks use process_sets")
    global _keyval
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval()
    duplicate = comm.Get_attr(_keyval)  # not a dict by handle: MPI reuses the handle of a freed communicator
    if duplicate is None:
        with creation(comm, "hvd.init()"):
            duplicate = comm.Dup()
        comm.Set_attr(_keyval, duplicate)
    return duplicate


def example(call: str, result: str = "") -> Callable[[_Function], _Function]:
    """Return a decorator that ends the docstring of a function with an example: a call, and what it prints.

    The imports that the call needs, and `init`, come before it.
    """
    lines = ["import numpy as np"] if "np." in call else []
    of_torch = ["import torch", "import mpistrat.integrations.hvd.torch as hvd"]
    lines += of_torch if "torch." in call else ["import mpistrat.integrations.hvd as hvd"]
    shown = "\n".join(f">>> {line}" for line in [*lines, "hvd.init()", call])

    def add(function: _Function) -> _Function:
        text = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = f"{text}\n\nExamples\n--------\n{shown}\n{result}\n"
        return function

    return add


global_process_set = ProcessSet([])
_TAG = 0  # of `Create_group` on the communicator of the job
_sets: dict[int, ProcessSet] = {}  # sets in use by number, from `init` on; set 0 has all ranks
_last_number = 0  # of the process sets since `init`


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
    global _last_number
    if _sets:
        return
    sets = [] if process_sets is None or process_sets == "dynamic" else [*process_sets]
    for process_set in sets:
        if not isinstance(process_set, ProcessSet):
            raise TypeError(f'process_sets must be a list of ProcessSet, or "dynamic", not {process_sets!r}')
    duplicate = communicator(comm)
    global_process_set.ranks = list(range(duplicate.size))
    global_process_set.begin(0, duplicate.rank, duplicate)
    _sets[0], _last_number = global_process_set, 0
    try:
        for process_set in sets:
            add_process_set(process_set)
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
    for process_set in further_sets():
        process_set.end()
    global_process_set.end()
    _sets.clear()


@example("hvd.is_initialized()", "True")
def is_initialized() -> bool:
    """Return whether `init` was called."""
    return bool(_sets)


def further_sets() -> list[ProcessSet]:
    """Return the process sets in use, except the set of all ranks."""
    return [process_set for number, process_set in _sets.items() if number]


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
    global _last_number
    ranks = topology()
    new_set = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    with structures.refusals("add_process_set", ranks):
        if len(set(new_set.ranks)) < len(new_set.ranks):
            raise ValueError(f"a process set must have each of its ranks once: {new_set}")
        if not set(new_set.ranks) <= set(range(ranks.size)):
            raise ValueError(f"{new_set} has ranks beyond the {ranks.size} of the job")
        if any(other.ranks == new_set.ranks for other in further_sets()):
            raise ValueError(f"a process set of these ranks is in use already: {new_set}")
    structures.agree(ranks, "add_process_set", tuple(new_set.ranks))
    _last_number += 1
    comm = None
    if ranks.rank in new_set.ranks:
        comm = ranks.parent.Create_group(ranks.parent.group.Incl(new_set.ranks), _TAG)
    new_set.begin(_last_number, ranks.rank, comm)
    _sets[_last_number] = new_set
    return new_set


@example("hvd.remove_process_set(hvd.global_process_set)", "False")
def remove_process_set(process_set: ProcessSet) -> bool:
    """End the use of a process set; return False if it is unknown, or set 0. Collective over all ranks."""
    number = process_set.process_set_id
    structures.agree(topology(), "remove_process_set", number)
    if not number or _sets.get(number) is not process_set:
        return False
    del _sets[number]
    process_set.end()
    return True


# --- ranks and nodes -----------------------------------------------------------------------------------


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


# --- names of Horovod that are not provided --------------------------------------------------------------

_INSTEAD = {
    "elastic": "mpistrat.experimental.ElasticLoop and `mpistrat run --elastic` (docs: Going on after a loss)",
    "ElasticSampler": "strategy.experimental_distribute_dataset(), whose state() and restore() go on within an epoch",
    "callbacks": "mpistrat.integrations.hvd.keras.callbacks",
    "HostsUpdatedInterrupt": "a batch script that starts the job again",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm, on a GPU, after `import mpistrat.integrations.torch` and "
    "torch.distributed.init_process_group('mpistrat')",
    "start_timeline": "`with mpistrat.experimental.trace(...)`, or `mpistrat run --trace`",
    "stop_timeline": "`with mpistrat.experimental.trace(...)`, or `mpistrat run --trace`",
    "run": "`mpistrat run -n RANKS program.py`, mpirun or srun",
    "DistributedGradientTape": "allreduce of the gradients",
}


def explained(module: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` whose error says what to use in place of a name of Horovod."""

    return absent.explained(module, absent.nothing, _INSTEAD)
