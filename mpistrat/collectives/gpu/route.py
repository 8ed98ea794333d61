"""The base class of routes, the ways to reduce arrays on GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.collectives.gpu.packing import Laid
from mpistrat.collectives.packing import Message
from mpistrat.runtime.topology import Topology


class Route(ABC):
    """One way to reduce messages on the ranks' GPUs.

    Attributes
    ----------
    name : str
        The name by which a user chooses the route.
    """

    name: str

    def obstacle(self, topology: Topology, device: int) -> str:
        """Return why the ranks cannot use this route, the same text on all ranks; empty if they can.

        Collective. The caller holds the collective lock.
        """
        return ""

    def supports(self, wire: np.dtype, combine: np.ufunc) -> bool:
        """Return whether the route can combine values of this dtype."""
        return True

    def meets(self, topology: Topology, message: Message, algorithm: str | None) -> bool:
        """Return whether `reduce`, for this message, calls `Topology.meet` before any other communication."""
        return False

    @abstractmethod
    def reduce(
        self,
        topology: Topology,
        device: int,
        jobs: Sequence[Laid],
        algorithm: str | None,
        timeout_seconds: float | None,
    ) -> None:
        """Write the reductions over all ranks. The caller holds the collective lock, and the device is current.

        Work that is already in the current stream comes before the reductions, and later work comes after them.
        """


def tried(topology: Topology, what: str, action: Callable[[], Any]) -> tuple[str, Any]:
    """Run an action on all ranks, and return the error of the first rank that failed, and the result here.

    Collective. The error is an empty text if the action succeeds on all ranks.
    """
    problem, done = "", None
    try:
        done = action()
    except (RuntimeError, MemoryError, OSError) as error:  # errors of CUDA, and out of memory
        problem = f"{what}: {error}"
    for rank, text in enumerate(topology.world.allgather(problem)):
        if text:
            return f"rank {rank}: {text}", None
    return "", done
