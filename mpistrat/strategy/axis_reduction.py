"""Reductions over replicas and axes of their values at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nest
from mpistrat.collectives import structures
from mpistrat.collectives.arithmetic import dtypes
from mpistrat.collectives.arithmetic.operations import FurtherOp, Op
from mpistrat.collectives.exact_over_axis import exact_sum_over_axis
from mpistrat.runtime import arrays
from mpistrat.runtime.topology import Alone, Topology
from mpistrat.strategy.local_reduction import (
    Axis,
    given_back,
    local_extreme,
    local_mean_parts,
    local_sum,
    mean_of_parts,
    sum_of_parts,
)
from mpistrat.values import DistributedValues, Mirrored, ReduceOp

if TYPE_CHECKING:
    from mpistrat.strategy.extended import StrategyExtended


def reduce_over_axis(extended: StrategyExtended, op: Op, value: Any, axis: Axis) -> Any:
    """Reduce a value over all replicas and over axes. The mean is taken over all examples.

    A list without distributed values is one array, as in a `Dataset`.

    Raises
    ------
    TypeError
        For a nested structure other than a list, or axes in a list.
    ValueError
        If a list cannot become one array.
    """
    if isinstance(axis, list):
        raise TypeError(f"axis must be an int or a tuple of ints, not the list {axis}")
    with np.errstate(all="ignore"):  # overflow gives infinity, as in a sum over replicas
        return _reduce(extended, op, value, axis)


def _reduce(extended: StrategyExtended, op: Op, value: Any, axis: Axis) -> Any:
    topology, options = extended.engine.topology, extended.engine.options
    form = f"{op.name} over axis {axis}"
    leaf = value
    if type(value) is not np.ndarray:
        with structures.refusals("all_reduce", topology, options.timeout_seconds):
            if isinstance(value, list) and not nest.holds(nest.flatten(value)[0], DistributedValues):
                value = _one_array(value)
            elif nest.is_nested(value):
                raise TypeError(
                    "reduce over an axis takes one value, not a structure: reduce its parts one by one"
                )
        (leaf,) = extended.engine.contributions(op, [value], form)
    with structures.refusals("all_reduce", topology, options.timeout_seconds):
        summed = op in (ReduceOp.SUM, ReduceOp.MEAN)
        exact = summed and options.algorithm == "exact" and _has_roundings(op, leaf)
        parts = [] if exact else _local_parts(op, leaf, axis)
    if exact:
        topology = Alone() if isinstance(value, Mirrored) else topology
        total, count = _exact_parts(topology, op, leaf, axis, options.timeout_seconds)
        return sum_of_parts(total, leaf) if op is ReduceOp.SUM else mean_of_parts(total, count, leaf)
    if op in (ReduceOp.SUM, FurtherOp.PROD):
        return sum_of_parts(extended.engine.all_reduce(op, parts, None, form)[0], like=leaf)
    if not isinstance(value, Mirrored):  # a Mirrored value: the mean over all replicas is the mean of one
        extremes = [] if op is ReduceOp.MEAN else extended.engine.all_reduce(op, [parts.pop(0)], None, form)
        parts = extremes + extended.engine.all_reduce(ReduceOp.SUM, parts, None, form)
    if op is ReduceOp.MEAN:
        return mean_of_parts(parts[0], parts[1], like=leaf)
    if not parts[1]:
        raise ValueError(f"{form}: the axis has no values on any replica")
    return given_back(parts[0], like=leaf)


def _one_array(values: list[Any]) -> np.ndarray:
    try:
        return arrays.as_numpy(values)
    except ValueError as error:
        raise ValueError(f"reduce over an axis takes a list as one array, but {error}") from None


def _local_parts(op: Op, leaf: Any, axis: Axis) -> list[Any]:
    if op in (FurtherOp.MAX, FurtherOp.MIN):
        return local_extreme(leaf, axis, op)
    return local_mean_parts(leaf, axis) if op is ReduceOp.MEAN else [local_sum(leaf, axis, op)]


def _has_roundings(op: Op, value: Any) -> bool:
    """Return whether the sum for ``op`` can round: it is floating point or complex, not integer."""
    return dtypes.accumulator(arrays.to_host(value).dtype, op).kind in "fc"


def _exact_parts(
    topology: Topology, op: Op, value: Any, axis: Axis, timeout_seconds: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum and the number of examples over an axis of all replicas; for MEAN in double precision."""
    array = arrays.to_host(value)
    wide = dtypes.accumulator(array.dtype, op)
    if wide.char not in "fdFD":
        raise TypeError(f"no exact sum of {array.dtype}: cast it to float64 or complex128")
    double = np.dtype(np.complex128 if wide.kind == "c" else np.float64)
    result = double if op is ReduceOp.MEAN else wide
    return exact_sum_over_axis(topology, array.astype(wide, copy=False), axis, result, timeout_seconds)
