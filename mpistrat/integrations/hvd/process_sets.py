"""Process sets: ranks that make collectives without the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.collectives import CollectiveAllReduce, CrossDeviceOps
from mpistrat.process import mpi
from mpistrat.runtime.recording import creation
from mpistrat.runtime.topology import Topology

_keyval: int | None = None


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
        if not all(isinstance(each, int | np.integer) for each in ranks):
            raise ValueError(f"a ProcessSet is made of the numbers of ranks, not {ranks!r}")
        self.ranks = sorted(map(int, ranks))
        self.process_set_id: int | None = None
        self._topology: Topology | None = None
        self._ops: CrossDeviceOps | None = None

    def begin(self, number: int, own_rank: int, comm: Any) -> None:
        """Let the set have a communicator, None on ranks outside of it. Collective over the set."""
        self.process_set_id, self._own_rank = number, own_rank
        if comm is not None:
            self._topology = Topology.of(comm)
            self._ops = CollectiveAllReduce().bound_to(self._topology)

    def end(self) -> None:
        """Forget the communicator, and free it unless it is that of all ranks. Collective over the set."""
        if self._topology is not None and self.process_set_id:
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
        """The cross-device ops of the set, where its topology is."""
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
    """Return the communicator of a job: the duplicate of the one that is given, or of all ranks.

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
    own = comm.Get_attr(_keyval)  # not by handle: MPI gives that of a freed communicator to another
    if own is None:
        with creation(comm, "hvd.init()"):
            own = comm.Dup()
        comm.Set_attr(_keyval, own)
    return own
