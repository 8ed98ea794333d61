"""The nodes that tests put the ranks on."""

from typing import Any

from mpi4py import MPI

from mpistrat.runtime.topology import Limits, Topology

SIZE = MPI.COMM_WORLD.size


def layouts(*texts: str) -> list[str]:
    """Return the texts that differ for this number of ranks. ``"0011"`` puts ranks 2 and 3 on the second node."""
    return list({str([text.index(node) for node in text[:SIZE]]): text[:SIZE] for text in texts}.values())


def on_nodes(layout: str, **limits: int) -> Any:
    """Return a new communicator whose ranks are on the nodes of a layout, with such `Limits`. The caller frees it."""
    comm = MPI.COMM_WORLD.Dup()
    Topology.of(comm, split=lambda comm: int(layout[comm.rank]), limits=Limits(**limits))
    return comm
