"""What an all-reduce algorithm is."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from mpistrat.runtime.device import Device
from mpistrat.runtime.topology import Topology


class Algorithm(ABC):
    """One way to add up arrays over the ranks of a topology.

    Attributes
    ----------
    name : str
        What a user calls it by.
    """

    name: str

    @abstractmethod
    def supports(self, topology: Topology, dtype: np.dtype, device: Device) -> bool:
        """Whether it can add arrays of this dtype that live on this kind of device."""

    @abstractmethod
    def cost(self, topology: Topology, nbytes: int) -> float:
        """Predicted seconds for one array of ``nbytes`` bytes."""

    @abstractmethod
    def sum(self, topology: Topology, send: np.ndarray, receive: np.ndarray) -> None:
        """Write the sum of all ranks' ``send`` into ``receive``; both contiguous, of one shape and dtype.

        ``send`` and ``receive`` may be the same array. The caller holds the topology's turn.
        """
