"""The base class of all-reduce algorithms."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from mpistrat.runtime.device import Device
from mpistrat.runtime.topology import Topology

WHOLE = 1 << 62  # bytes of a piece for an algorithm that divides its messages itself


def agreement_cost(topology: Topology) -> float:
    """Return the seconds of an agreement: two barriers, and an exchange for each doubling of the nodes."""
    return 20e-6 + math.ceil(math.log2(len(topology.nodes))) * 20e-6


class Algorithm(ABC):
    """One way to combine arrays over the ranks of a topology.

    Attributes
    ----------
    name : str
        The name by which a user chooses the algorithm.
    meets : bool
        Whether `reduce` calls `Topology.meet` before it communicates in any other way.
    by_name_only : bool
        Whether the algorithm is used only if the user names it.
    """

    name: str
    meets: bool = False
    by_name_only: bool = False

    @abstractmethod
    def supports(self, topology: Topology, dtype: np.dtype, device: Device) -> bool:
        """Return whether the algorithm can combine arrays of this dtype on this kind of device."""

    @abstractmethod
    def cost(self, topology: Topology, nbytes: int) -> float:
        """Return the predicted seconds for one array of ``nbytes`` bytes."""

    @abstractmethod
    def piece_bytes(self, topology: Topology) -> int:
        """Return the bytes of the largest message that `reduce` takes."""

    @abstractmethod
    def reduce(self, topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
        """Write the combination of all ranks' ``send`` into ``receive``. The caller holds the collective lock.

        Parameters
        ----------
        topology : Topology
        combine : numpy.ufunc
            ``numpy.add``, ``maximum``, ``minimum`` or ``multiply``.
        send, receive : numpy.ndarray
            Flat, contiguous, of one length; may be the same array. The values are combined in the dtype of ``receive``.
        """
