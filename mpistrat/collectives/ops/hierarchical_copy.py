"""Cross-device ops that reduce inside the nodes first, then between their leaders."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpistrat.collectives.ops.default import CollectiveAllReduce
from mpistrat.collectives.options import CommunicationOptions


class HierarchicalCopyAllReduce(CollectiveAllReduce):
    """Cross-device ops that reduce to each node's leader, all-reduce between leaders, and copy back.

    Parameters
    ----------
    num_packs : int
        The number of messages that a list of arrays is packed into; 0 does not pack.

    Raises
    ------
    ValueError
        If ``num_packs`` is negative.

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.MirroredStrategy(cross_device_ops=mpistrat.HierarchicalCopyAllReduce())
    >>> float(strategy.reduce("SUM", 3.0, axis=None))
    3.0
    """

    def __init__(self, num_packs: int = 1):
        if num_packs < 0:
            raise ValueError(f"num_packs must not be negative, not {num_packs}")
        super().__init__(algorithm="hierarchical_copy")
        self._num_packs = num_packs

    def _bytes_per_pack(self, values: Sequence[np.ndarray], options: CommunicationOptions) -> int:
        if self._num_packs == 0:
            return 1  # every array is larger than one byte, so each gets its own message
        return math.ceil(sum(value.nbytes for value in values) / self._num_packs)
