"""The dtypes that can be reduced, and the precision in which they are added."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mpistrat.collectives.arithmetic.operations import FurtherOp, Op
from mpistrat.values import ReduceOp

# Half precision is sent and added as float32, and the result is rounded once.
_HALF = ("float16", "bfloat16")


@lru_cache(maxsize=256)
def has_mean(dtype: np.dtype) -> bool:
    """Return whether the mean of values of a dtype has that dtype: true for floating point and complex numbers."""
    # Floats of other packages than NumPy do not have an MPI type, except bfloat16, which is sent as float32.
    return dtype.name in _HALF or (dtype.kind in "fc" and dtype.type.__module__ == "numpy")


@lru_cache(maxsize=256)
def accumulator(dtype: np.dtype, op: Op) -> np.dtype:
    """Return the dtype in which values of ``dtype`` are added. Raise TypeError if ``op`` cannot reduce them."""
    if dtype.name in _HALF:
        return np.dtype(np.float32)
    if dtype.kind == "c" and op in (FurtherOp.MAX, FurtherOp.MIN):
        raise TypeError(f"{op.name} of {dtype} is not defined: complex numbers have no order")
    if dtype.kind in "iu":
        if op is ReduceOp.MEAN:  # a sum that cannot overflow
            return np.dtype(np.int64 if dtype.itemsize < 8 else np.float64)
        # MPI libraries add some narrow integers by instructions of the processor that saturate.
        return np.dtype(f"{dtype.kind}{max(dtype.itemsize, 4)}")
    if has_mean(dtype):
        return dtype.newbyteorder("=")
    if dtype.kind == "b":
        raise TypeError(f"{op.name} of bool is not defined: cast to integers to count, or use strategy.agree for 'all'")
    raise TypeError(
        f"{op.name} of {dtype} is not defined: only integers, floats and complex numbers can be reduced; "
        "strategy.gather_object() takes other objects"
    )


@lru_cache(maxsize=256)
def result(dtype: np.dtype, op: Op) -> np.dtype:
    """Return the dtype of the result: the dtype of the values, but float64 for the mean of integers."""
    if op is ReduceOp.MEAN and dtype.kind in "iu":
        return np.dtype(np.float64)
    return dtype if dtype.isnative else dtype.newbyteorder("=")
