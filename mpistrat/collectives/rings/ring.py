"""The all-reduce on a ring, for messages whose time depends on the bandwidth of the wire."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np


def ring_all_reduce(comm: Any, combine: np.ufunc, data: np.ndarray, scratch: np.ndarray) -> None:
    """Combine all ranks' ``data`` in place, by a reduce-scatter and an all-gather on a ring.

    Every rank sends ``2 (size - 1) / size`` times the bytes of ``data``, which is the minimum (Patarasuk and Yuan
    2009). All ranks get the same bits: each part is combined once, in the order of the ring.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    combine : numpy.ufunc
    data : numpy.ndarray, shape (count,)
    scratch : numpy.ndarray
        Memory of the same dtype, with room for ``count / size`` elements, rounded up.
    """
    size, rank = comm.size, comm.rank
    if size == 1 or not len(data):
        return
    ends = [len(data) * i // size for i in range(size + 1)]
    parts = [data[first:last] for first, last in itertools.pairwise(ends)]
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        mine = parts[(rank - step - 1) % size]
        theirs = scratch[: len(mine)]
        comm.Sendrecv(parts[(rank - step) % size], after, recvbuf=theirs, source=before)
        combine(mine, theirs, out=mine)
    for step in range(size - 1):
        comm.Sendrecv(
            parts[(rank - step + 1) % size], after, recvbuf=parts[(rank - step) % size], source=before
        )
