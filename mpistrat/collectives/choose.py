"""Which algorithm is used where: the table."""

from __future__ import annotations

import numpy as np

from mpistrat.collectives.algorithm import Algorithm
from mpistrat.collectives.hierarchical import HierarchicalAllReduce
from mpistrat.collectives.hierarchical_copy import HierarchicalCopy
from mpistrat.collectives.identity import Identity
from mpistrat.collectives.leader import LeaderAllReduce
from mpistrat.collectives.mpi_all_reduce import MpiAllReduce
from mpistrat.runtime.device import Device
from mpistrat.runtime.topology import Topology

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Identity(),
        HierarchicalAllReduce(),
        LeaderAllReduce(),
        MpiAllReduce(),
        HierarchicalCopy(),
    )
}


def choose(
    topology: Topology, nbytes: int, dtype: np.dtype, device: Device, name: str | None = None
) -> Algorithm:
    """The algorithm of that name, or the one with the lowest predicted cost.

    Raises
    ------
    ValueError
        If there is none of that name.
    RuntimeError
        If none, or not the one asked for, can add these values here.
    """
    return min(_able(topology, dtype, device, name), key=lambda algorithm: algorithm.cost(topology, nbytes))


def piece_bytes(topology: Topology, dtype: np.dtype, device: Device, name: str | None = None) -> int:
    """Bytes of a message that whichever algorithm is chosen takes in one piece."""
    return min(algorithm.piece_bytes(topology) for algorithm in _able(topology, dtype, device, name))


def _able(topology: Topology, dtype: np.dtype, device: Device, name: str | None) -> list[Algorithm]:
    if name is not None and name not in ALGORITHMS:
        raise ValueError(f"{name!r} is no all-reduce algorithm: use one of {', '.join(ALGORITHMS)}")
    able = [
        algorithm
        for algorithm in ALGORITHMS.values()
        if name in (None, algorithm.name) and algorithm.supports(topology, dtype, device)
    ]
    if not able:
        raise RuntimeError(
            f"no all-reduce {'of that name ' if name else ''}adds {dtype} on {device} over {topology.size} ranks"
        )
    return able


def describe(topology: Topology) -> str:
    """A table of what is chosen for float32 messages of growing size, and what each way is predicted to cost."""
    dtype, device = np.dtype(np.float32), Device("cpu")
    able = [each for each in ALGORITHMS.values() if each.supports(topology, dtype, device)]
    lines = ["bytes        chosen              " + "".join(f"{each.name:>22}" for each in able)]
    for exponent in range(2, 31, 4):
        nbytes = 1 << exponent
        chosen = choose(topology, nbytes, dtype, device).name
        costs = "".join(f"{each.cost(topology, nbytes) * 1e6:>19.1f} us" for each in able)
        lines.append(f"{nbytes:<12} {chosen:<20}{costs}")
    return "\n".join(lines)
