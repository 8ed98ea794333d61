"""The base class of routes, the ways to reduce arrays on GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpistrat.collectives.gpu.packing import Laid
from mpistrat.collectives.packing import Message
from mpistrat.runtime.topology import Topology


class GpuCall(NamedTuple):
    """What a route is told of an all-reduce. The device is this rank's GPU, which is current."""

    topology: Topology
    device: int
    algorithm: str | None  # of the host, which the user named
    timeout_seconds: float | None
    half: bool = False  # whether NCCL adds half precision as it is


class Route(ABC):
    """One way to reduce messages on the ranks' GPUs. A user chooses it by its ``name``."""

    name: str

    def obstacle(self, topology: Topology, device: int) -> str:
        """Return why the ranks cannot use this route, or an empty text, the same on all. Collective, under the lock."""
        return ""

    def supports(self, wire: np.dtype, combine: np.ufunc) -> bool:
        """Return whether the route can combine values of this dtype."""
        return True

    def meets(self, topology: Topology, message: Message, algorithm: str | None) -> bool:
        """Return whether `reduce`, for this message, calls `CollectiveLock.meet` before any other communication."""
        return False

    @abstractmethod
    def reduce(self, call: GpuCall, jobs: Sequence[Laid]) -> None:
        """Write the reductions over all ranks, in the order of the current stream. The caller holds the lock."""
