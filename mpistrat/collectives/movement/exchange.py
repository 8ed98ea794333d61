"""Messages from any rank to any other, as one part of a collective."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.process import mpi
from mpistrat.runtime.topology import Topology

_TAG = 3  # in the communicator in which one collective runs at a time


def exchange(topology: Topology, sends: Sequence[np.ndarray | None], receives: Sequence[np.ndarray | None]) -> None:
    """Send ``sends[rank]`` to each rank and receive ``receives[rank]``, bytes of lengths that fit; None is not sent."""
    comm, step, rank = topology.world, topology.limits.message_bytes, topology.rank
    requests = []
    for other, data in enumerate(receives):
        if data is not None and other != rank:
            requests += [comm.Irecv(piece, other, _TAG) for piece in messages(data, step)]
    for other, data in enumerate(sends):
        if data is not None and other != rank:
            requests += [comm.Isend(piece, other, _TAG) for piece in messages(data, step)]
    own, mine = sends[rank], receives[rank]
    if own is not None and mine is not None:
        mine[...] = own
    mpi.start().Request.Waitall(requests)


def messages(data: np.ndarray, step: int) -> list[np.ndarray]:
    """Return the parts of an array of bytes that fit into a message; one of no bytes if it is empty."""
    return [data[start : start + step] for start in range(0, max(len(data), 1), step)]
