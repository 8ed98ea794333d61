"""What a way of reducing arrays on GPUs is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.collectives.gpu.packing import GpuBucket, PackedBucket
from mpistrat.runtime.topology import Topology


class Route(ABC):
    """One way to reduce messages that live on the ranks' GPUs.

    Attributes
    ----------
    name : str
        What a user calls it by.
    """

    name: str

    def obstacle(self, topology: Topology, device: int) -> str:
        """Why the ranks cannot go this way at all; empty if they can. Collective, in a turn; the same on all ranks."""
        return ""

    def supports(self, wire: np.dtype, combine: np.ufunc) -> bool:
        """Whether it can combine values of this dtype."""
        return True

    def meets(self, topology: Topology, bucket: GpuBucket, algorithm: str | None) -> bool:
        """Whether `reduce`, given this bucket first, calls `Topology.meet` before anything else that communicates."""
        return False

    @abstractmethod
    def reduce(
        self,
        topology: Topology,
        device: int,
        jobs: Sequence[PackedBucket],
        algorithm: str | None,
        timeout_seconds: float | None,
    ) -> None:
        """Write the reductions over all ranks. The caller holds the turn, and the device is current.

        What the current stream does before comes before, and what it does next comes after.
        """


def tried(topology: Topology, what: str, action: Callable[[], Any]) -> tuple[str, Any]:
    """What went wrong on the first rank where something did, told to all; and what the action returned here.

    Collective.
    """
    problem, done = "", None
    try:
        done = action()
    except (RuntimeError, MemoryError, OSError) as error:  # CUDA's, and those for want of memory
        problem = f"{what}: {error}"
    for rank, text in enumerate(topology.world.allgather(problem)):
        if text:
            return f"rank {rank}: {text}", None
    return "", done
