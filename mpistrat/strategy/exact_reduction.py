"""Exact sums over an axis and over all replicas, for the algorithm ``"exact"``."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.collectives.arithmetic import dtypes
from mpistrat.collectives.arithmetic.operations import Op
from mpistrat.collectives.exact_over_axis import exact_sum_over_axis
from mpistrat.runtime import arrays
from mpistrat.runtime.topology import Topology
from mpistrat.strategy.local_reduction import Axis
from mpistrat.values import ReduceOp


def has_roundings(op: Op, value: Any) -> bool:
    """Return whether the sum for ``op`` can round: it is floating point or complex, not integer."""
    return dtypes.accumulator(arrays.to_host(value).dtype, op).kind in "fc"


def exact_parts(
    topology: Topology, op: Op, value: Any, axis: Axis, timeout_seconds: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum and the number of examples over an axis of all replicas; for MEAN in double precision.

    Raises
    ------
    ValueError
        If the axis is out of range. On every rank, if shapes or dtypes do not match.
    TypeError
        If the value is a longdouble.
    """
    array = arrays.to_host(value)
    wide = dtypes.accumulator(array.dtype, op)
    if wide.char not in "fdFD":
        raise TypeError(f"no exact sum of {array.dtype}: cast it to float64 or complex128")
    double = np.dtype(np.complex128 if wide.kind == "c" else np.float64)
    result = double if op is ReduceOp.MEAN else wide
    return exact_sum_over_axis(topology, array.astype(wide, copy=False), axis, result, timeout_seconds)
