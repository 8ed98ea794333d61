"""The base class of all-reduce algorithms."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpistrat.runtime.topology import Topology

WHOLE = 1 << 62  # bytes of a piece for an algorithm that divides its messages itself


def agreement_cost(topology: Topology) -> float:
    """Return the seconds of an agreement: two barriers, and an exchange for each doubling of the nodes."""
    return 20e-6 + math.ceil(math.log2(len(topology.nodes))) * 20e-6


class Cost(NamedTuple):
    """The predicted seconds of a message on some ranks."""

    fixed: float
    per_byte: float
    per_piece: float = 0.0
    piece: int = WHOLE  # the bytes of a piece


class Meeting(NamedTuple):
    """The steps of a small all-reduce, for one dtype and length: write to a slot, meet once, take the combination."""

    # this rank's place for its values, by the generation of the node's memory before the meeting
    slots: Sequence[np.ndarray]
    # waits for all ranks. Gets the token of the meeting; returns whether all ranks gave the same token.
    meet: Callable[[int], bool]
    # writes the combination of all ranks' values to its keyword ``out``, by the generation before the meeting
    take: Sequence[Callable[..., object]]


class Algorithm(ABC):
    """One way to combine arrays over the ranks of a topology."""

    name: str  # the name by which a user chooses the algorithm
    # the character codes of the dtypes (`numpy.dtype.char`) that the algorithm combines. Half precision is not needed:
    # float16 and bfloat16 are sent as float32, see `accumulator`.
    dtypes: str = "bBhHiIlLqQefdgFDG"
    # whether `reduce` calls `CollectiveLock.meet` before it communicates in any other way. The lock then makes no
    # meeting of its own. If this is true and `reduce` does not meet, ranks in different calls are not noticed: they
    # hang, or combine values that do not belong together.
    meets: bool = False
    by_name_only: bool = False  # whether the algorithm is used only if the user names it
    # whether buffers that the ranks of a node share may be combined where they are in place of `reduce`, by a slice of
    # each rank: the sums then have the same bits
    in_place: bool = False

    def fits(self, topology: Topology) -> bool:
        """Return whether the algorithm works on these ranks."""
        return True

    @abstractmethod
    def cost(self, topology: Topology) -> Cost:
        """Return the predicted cost of messages on these ranks, on which the algorithm works."""

    @abstractmethod
    def piece_bytes(self, topology: Topology) -> int:
        """Return the bytes of the largest message that `reduce` takes, usually ``topology.limits.chunk_bytes``."""

    @abstractmethod
    def reduce(self, topology: Topology, combine: np.ufunc, send: np.ndarray, receive: np.ndarray) -> None:
        """Write the combination of all ranks' ``send`` into ``receive``, in its dtype. The caller holds the lock.

        Both are flat, contiguous, of one length, and may be the same array.
        """

    def meeting(self, topology: Topology, combine: np.ufunc, dtype: np.dtype, length: int) -> Meeting | None:
        """Return prepared steps for a small message, with less work in Python than `reduce`, or None."""
        return None
