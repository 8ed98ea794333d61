"""One replica's sums and extremes over an axis, before the replicas are combined."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpistrat.collectives.arithmetic import dtypes
from mpistrat.collectives.arithmetic.division import divide
from mpistrat.collectives.arithmetic.operations import FurtherOp, Op
from mpistrat.runtime import arrays
from mpistrat.values import ReduceOp

Axis = int | tuple[int, ...]


def local_sum(value: Any, axis: Axis, op: Op) -> Any:
    """Return the sum over an axis, for PROD the product, in the dtype that ``op`` adds in.

    Raises
    ------
    ValueError
        If the axis is out of range.
    TypeError
        If the value is bool or not numeric.
    """
    array, wide = _array(value, axis, op)
    wider = array.astype(wide, copy=False)
    total = wider.prod(axis=axis) if op is FurtherOp.PROD else wider.sum(axis=axis)
    return np.asarray(total) if type(array) is np.ndarray else total


def local_extreme(value: Any, axis: Axis, op: Op) -> list[Any]:
    """Return the maximum or minimum over an axis, and the number of examples that it is of.

    Without examples the extreme is the value that no other changes.

    Raises
    ------
    ValueError, TypeError
        As `local_sum`.
    """
    array, _ = _array(value, axis, op)
    count = examples(array, axis)
    if count:
        extreme = array.max(axis=axis) if op is FurtherOp.MAX else array.min(axis=axis)
    else:
        shape = array.sum(axis=axis).shape
        extreme = type(array)(shape, array.dtype)
        extreme[...] = _neutral(array.dtype, op)
    return [np.asarray(extreme) if type(array) is np.ndarray else extreme, np.array(count, np.int64)]


def _array(value: Any, axis: Axis, op: Op) -> tuple[Any, np.dtype]:
    """Return a value as an array, and the dtype that ``op`` adds in."""
    array = arrays.numpy_or_cupy(value)
    wide = dtypes.accumulator(array.dtype, op)
    if array.ndim == 0:
        raise ValueError(f"axis {axis} is out of range for a scalar")
    return array, wide


def _neutral(dtype: np.dtype, op: Op) -> Any:
    sign = -1 if op is FurtherOp.MAX else 1
    if dtype.kind not in "iu":
        return sign * np.inf
    limits = np.iinfo(dtype)
    return limits.min if sign < 0 else limits.max


def examples(array: Any, axis: Axis) -> int:
    """Return the number of elements along one or several axes."""
    return math.prod(array.shape[i] for i in (axis if isinstance(axis, tuple) else (axis,)))


def sum_of_parts(total: Any, like: Any) -> Any:
    """Return the result of SUM or PROD over an axis, in the dtype and library of ``like``."""
    dtype = arrays.numpy_or_cupy(like).dtype
    half = dtype.kind not in "iu" and dtypes.accumulator(dtype, ReduceOp.SUM).itemsize > dtype.itemsize
    return given_back(total.astype(dtypes.result(dtype, ReduceOp.SUM)) if half else total, like)


def local_mean_parts(value: Any, axis: Axis) -> list[Any]:
    """Return the sum and the number of examples over an axis."""
    total = local_sum(value, axis, ReduceOp.MEAN)
    return [total, np.array(examples(arrays.numpy_or_cupy(value), axis), np.int64)]


def mean_of_parts(total: Any, count: np.ndarray, like: Any) -> Any:
    """Return the mean over all examples of all replicas, in the dtype and library of ``like``; nan without examples."""
    dtype = arrays.numpy_or_cupy(like).dtype
    mean = divide(total, count[()])
    if not arrays.on_gpu(mean):
        mean = np.asarray(mean)
    return given_back(mean.astype(dtypes.result(dtype, ReduceOp.MEAN), copy=False), like)


def given_back(result: Any, like: Any) -> Any:
    """Return a result in the library of ``like``."""
    if arrays.on_gpu(result):
        return arrays.from_cupy(result, like)
    return result[()] if isinstance(like, (np.ndarray, np.generic)) else arrays.from_host(result, like)
