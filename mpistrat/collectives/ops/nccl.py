"""Cross-device ops that reduce by NCCL, for ranks that each have their own GPU."""

from __future__ import annotations

from mpistrat.collectives.ops.default import CollectiveAllReduce
from mpistrat.collectives.options import CommunicationOptions


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
        if num_packs < 0:
            raise ValueError(f"num_packs must not be negative, not {num_packs}")
        from mpistrat.collectives.gpu.nccl import nccl_for  # most programs do not use a GPU

        nccl_for("NcclAllReduce")
        super().__init__()
        self._num_packs = num_packs

    def _gpu_route(self, options: CommunicationOptions) -> str | None:
        return "nccl"
