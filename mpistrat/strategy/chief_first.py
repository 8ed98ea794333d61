"""A context whose block replica 0 runs before the others."""

from __future__ import annotations

from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.runtime.topology import Topology


class ChiefFirst:
    """A context whose block rank 0 runs first, then all others. It yields whether this is rank 0.

    Raises
    ------
    RuntimeError
        On the other ranks, if rank 0 left its block with an error.
    """

    def __init__(self, topology: Topology):
        self._topology = topology
        self._mismatches = 0

    def __enter__(self) -> bool:
        topology = self._topology
        if topology.rank == 0:
            self._mismatches = topology.mismatches
            return True
        failure = topology.broadcast_object(None, name="chief_first")
        if failure is not None:
            raise RuntimeError(f"rank {topology.rank}: replica 0 failed in chief_first(): {failure}")
        return False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        topology = self._topology
        if topology.rank:
            return
        if isinstance(error, MismatchError) and topology.mismatches != self._mismatches:
            return  # the other ranks wait here, met a collective of the block, and have raised too
        topology.broadcast_object(None if error is None else repr(error), name="chief_first")
