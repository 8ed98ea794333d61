"""Cross-device ops with one algorithm or route: by the leaders of nodes, or by NCCL."""

from __future__ import annotations

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
        super().__init__("hierarchical_copy", num_packs)


class NcclAllReduce(CollectiveAllReduce):
    """Cross-device ops that reduce arrays on GPUs by NCCL, and arrays on the host as `CollectiveAllReduce`.

    Parameters
    ----------
    num_packs : int
        The number of messages that a list of arrays is packed into; 0 does not pack.

    Raises
    ------
    ValueError
        If ``num_packs`` is negative.
    RuntimeError
        If CuPy, its NCCL or a GPU is missing: the text says which. On every rank at the first reduction, if two
        ranks share a GPU.

    Examples
    --------
    >>> import mpistrat
    >>> try:
    ...     ops = mpistrat.NcclAllReduce()
    ... except RuntimeError as error:
    ...     ops = mpistrat.HierarchicalCopyAllReduce()
    """

    def __init__(self, num_packs: int = 1):
        super().__init__(num_packs=num_packs)
        from mpistrat.collectives.gpu.nccl import nccl_for  # most programs do not use a GPU

        nccl_for("NcclAllReduce")

    def _gpu_route(self, options: CommunicationOptions) -> str | None:
        return "nccl"
