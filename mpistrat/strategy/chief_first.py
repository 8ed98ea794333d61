"""Replica 0 before the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpistrat.runtime.topology import Topology


@contextmanager
def chief_first(topology: Topology) -> Iterator[bool]:
    """Context that rank 0 goes through while the others wait, and then they; tells whether this is rank 0.

    Raises
    ------
    RuntimeError
        On the other ranks, if rank 0 left its block with an error.
    """
    if topology.rank == 0:
        try:
            yield True
        except BaseException as error:
            topology.broadcast_object(repr(error))
            raise
        topology.broadcast_object(None)
        return
    failure = topology.broadcast_object(None)
    if failure is not None:
        raise RuntimeError(f"rank {topology.rank}: replica 0 failed in chief_first(): {failure}")
    yield False
