"""One replica's sums over an axis, before the replicas are combined."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpistrat.collectives.arithmetic import dtypes
from mpistrat.collectives.arithmetic.division import divide
from mpistrat.runtime import arrays
from mpistrat.values import ReduceOp

Axis = int | tuple[int, ...]


def local_sum(value: Any, axis: Axis, op: ReduceOp = ReduceOp.SUM) -> Any:
    """Return the sum over an axis, in the dtype that ``op`` adds in.

    Raises
    ------
    ValueError
        If the axis is out of range.
    TypeError
        If the value is bool or not numeric.
    """
    array = arrays.numpy_or_cupy(value)
    wide = dtypes.accumulator(array.dtype, op)
    if array.ndim == 0:
        raise ValueError(f"axis {axis} is out of range for a scalar")
    if type(array) is not np.ndarray:
        return array.astype(wide, copy=False).sum(axis=axis)
    return np.asarray(np.sum(array.astype(wide, copy=False), axis=axis))


def sum_of_parts(total: Any, like: Any) -> Any:
    """Return the result of a SUM over an axis, in the dtype and library of ``like``."""
    dtype = arrays.numpy_or_cupy(like).dtype
    half = dtype.kind not in "iu" and dtypes.accumulator(dtype, ReduceOp.SUM).itemsize > dtype.itemsize
    return _given_back(total.astype(dtypes.result(dtype, ReduceOp.SUM)) if half else total, like)


def local_mean_parts(value: Any, axis: Axis) -> list[Any]:
    """Return the sum and the number of examples over an axis."""
    shape = arrays.numpy_or_cupy(value).shape
    total = local_sum(value, axis, ReduceOp.MEAN)
    axes = axis if isinstance(axis, tuple) else (axis,)
    return [total, np.array(math.prod(shape[i] for i in axes), np.int64)]


def mean_of_parts(total: Any, count: np.ndarray, like: Any) -> Any:
    """Return the mean over all examples of all replicas, in the dtype and library of ``like``; nan without examples."""
    dtype = arrays.numpy_or_cupy(like).dtype
    mean = divide(total, count[()])
    if not arrays.on_gpu(mean):
        mean = np.asarray(mean)
    return _given_back(mean.astype(dtypes.result(dtype, ReduceOp.MEAN), copy=False), like)


def _given_back(result: Any, like: Any) -> Any:
    if arrays.on_gpu(result):
        return arrays.from_cupy(result, like)
    return result[()] if isinstance(like, (np.ndarray, np.generic)) else arrays.from_host(result, like)
