"""What an all-reduce algorithm is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from mpistrat.runtime.device import Device
from mpistrat.runtime.topology import Topology

WHOLE = 1 << 62  # bytes of a piece where an algorithm cuts its messages itself


def agreement_cost(topology: Topology) -> float:
    """Seconds until all know that all are in the same operation: two barriers, and an exchange for each doubling."""
    return 20e-6 + math.ceil(math.log2(len(topology.nodes))) * 20e-6


class Algorithm(ABC):
    """One way to combine arrays over the ranks of a topology.

    Attributes
    ----------
    name : str
        What a user calls it by.
    meets : bool
        Whether `reduce` calls `Topology.meet` before anything else that communicates.
    by_name_only : bool
        Whether it is never chosen for its cost.
    """

    name: str
    meets: bool = False
    by_name_only: bool = False

    @abstractmethod
    def supports(self, topology: Topology, dtype: np.dtype, device: Device) -> bool:
        """Whether it can combine arrays of this dtype that live on this kind of device."""

    @abstractmethod
    def cost(self, topology: Topology, nbytes: int) -> float:
        """Predicted seconds for one array of ``nbytes`` bytes."""

    @abstractmethod
    def piece_bytes(self, topology: Topology) -> int:
        """Bytes of the largest message that `reduce` is given."""

    @abstractmethod
    def reduce(self, topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
        """Write the combination of all ranks' ``send`` into ``receive``. The caller holds the topology's turn.

        Parameters
        ----------
        topology : Topology
        combine : numpy.ufunc
            ``numpy.add``, ``maximum``, ``minimum`` or ``multiply``.
        send, receive : numpy.ndarray
            Flat, contiguous, of one length; may be the same. The dtype of ``receive`` is the one to combine in.
        """
