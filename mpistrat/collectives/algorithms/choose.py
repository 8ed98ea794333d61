"""The table of all-reduce algorithms, and the choice of one for each message."""

from __future__ import annotations

import numpy as np

from mpistrat.collectives.algorithms import costs
from mpistrat.collectives.algorithms.contract import Algorithm
from mpistrat.collectives.algorithms.exact import ExactAllReduce
from mpistrat.collectives.algorithms.hierarchical import HierarchicalAllReduce
from mpistrat.collectives.algorithms.hierarchical_copy import HierarchicalCopy
from mpistrat.collectives.algorithms.identity import Identity
from mpistrat.collectives.algorithms.leader import LeaderAllReduce
from mpistrat.collectives.algorithms.mpi import MpiAllReduce
from mpistrat.collectives.algorithms.mpi_nonblocking import MpiNonblockingAllReduce
from mpistrat.collectives.algorithms.ordered import OrderedAllReduce
from mpistrat.runtime.device import Device
from mpistrat.runtime.topology import Topology

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Identity(),
        HierarchicalAllReduce(),
        LeaderAllReduce(),
        MpiAllReduce(),
        MpiNonblockingAllReduce(),
        HierarchicalCopy(),
        OrderedAllReduce(),
        ExactAllReduce(),
    )
}


GPU_ROUTES = ("nccl", "gpu_direct", "pinned")  # the names of the routes for arrays on GPUs


def choose(
    topology: Topology, nbytes: int, dtype: np.dtype, device: Device, name: str | None = None
) -> Algorithm:
    """Return the algorithm with this name, or the one with the lowest cost.

    Raises
    ------
    ValueError
        If the name is unknown.
    RuntimeError
        If the algorithm of this name, or every algorithm, does not support these values on these ranks.
    """
    return min(
        _able(topology, dtype, device, name), key=lambda algorithm: costs.of(topology, algorithm, nbytes)
    )


def piece_bytes(topology: Topology, dtype: np.dtype, device: Device, name: str | None = None) -> int:
    """Return the bytes of a message that every algorithm that may be chosen takes in one piece."""
    return min(algorithm.piece_bytes(topology) for algorithm in _able(topology, dtype, device, name))


def _able(topology: Topology, dtype: np.dtype, device: Device, name: str | None) -> list[Algorithm]:
    if topology.size == 1:
        return [ALGORITHMS["identity"]]
    if name is None:
        named = [each for each in ALGORITHMS.values() if not each.by_name_only]
    elif name in ALGORITHMS:
        named = [ALGORITHMS[name]]
    elif name in GPU_ROUTES:
        raise RuntimeError(
            f"implementation {name.upper()} combines arrays on GPUs, and not {dtype} on {device}: use AUTO"
        )
    else:
        raise ValueError(f"{name!r} is not an all-reduce algorithm: use one of {', '.join(ALGORITHMS)}")
    able = [each for each in named if each.supports(topology, dtype, device)]
    if not able:
        raise RuntimeError(
            f"no all-reduce {f'by the name of {name} ' if name else ''}combines {dtype} on {device} over "
            f"{topology.size} ranks on {len(topology.nodes)} node(s)"
            + ("" if topology.memory is not None else ", which cannot share memory")
        )
    return able


def describe(topology: Topology) -> str:
    """Return a table of the algorithms chosen for float32 messages of growing size, and of all predicted costs."""
    dtype, device = np.dtype(np.float32), Device("cpu")
    able = _able(topology, dtype, device, None)
    lines = ["bytes        chosen              " + "".join(f"{each.name:>22}" for each in able)]
    for exponent in range(2, 31, 4):
        nbytes = 1 << exponent
        chosen = choose(topology, nbytes, dtype, device).name
        seconds = [costs.of(topology, each, nbytes) for each in able]
        lines.append(f"{nbytes:<12} {chosen:<20}" + "".join(f"{each * 1e6:>19.1f} us" for each in seconds))
    return "\n".join(lines)
