"""NCCL: not in this version, and it says what is missing."""

from __future__ import annotations

from mpistrat.collectives.collective_all_reduce import CollectiveAllReduce


class NcclAllReduce(CollectiveAllReduce):
    """All-reduce by NCCL, which this version does not use yet: creating it raises.

    Parameters
    ----------
    num_packs : int
        How many messages a list of arrays is packed into; 0 does not pack.

    Raises
    ------
    ValueError
        If ``num_packs`` is negative.
    RuntimeError
        Always; the text says whether CuPy, its NCCL or a GPU is missing too.

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
        _require_nccl()
        raise RuntimeError(
            "NcclAllReduce is not in this version, which reduces on the host: use HierarchicalCopyAllReduce, or "
            "leave cross_device_ops out"
        )


def _require_nccl() -> None:
    needs = "NcclAllReduce needs CuPy with NCCL and a GPU for every rank: "
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            f"{needs}CuPy is not installed (pip install 'mpistrat[cuda12]' or 'mpistrat[cuda13]')"
        ) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise RuntimeError(f"{needs}CuPy sees no GPU: {error}") from error
    if count == 0:
        raise RuntimeError(f"{needs}this process sees no GPU (CUDA_VISIBLE_DEVICES may hide it)")
    try:
        from cupy.cuda import nccl  # noqa: F401  # is there or not
    except ImportError as error:
        raise RuntimeError(f"{needs}this CuPy was built without NCCL") from error
