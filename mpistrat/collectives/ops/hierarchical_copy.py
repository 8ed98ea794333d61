"""Cross-device ops that reduce inside the nodes first, then between their leaders."""

from __future__ import annotations

from mpistrat.collectives.ops.default import CollectiveAllReduce


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
