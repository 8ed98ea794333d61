"""Reductions over replicas and axes of their values at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nest
from mpistrat.arrays import arrays
from mpistrat.collectives import structures
from mpistrat.collectives.algorithms.choose import Choice
from mpistrat.collectives.algorithms.exact import exact_sum
from mpistrat.collectives.operations import FurtherOp, Op, accumulator, divide, result_dtype
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import SingleRankTopology, Topology
from mpistrat.values import DistributedValues, Mirrored, PerReplica, ReduceOp

if TYPE_CHECKING:
    from mpistrat.strategy.extended import StrategyExtended

Axis = int | tuple[int, ...]


def reduce_over_axis(extended: StrategyExtended, op: Op, value: Any, axis: Axis) -> Any:
    """Reduce a value over all replicas and over axes. The mean is taken over all examples.

    A list without distributed values is one array. Raise TypeError for another nested structure or axes in a list, and
    ValueError if a list cannot become one array.
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
                raise TypeError("reduce over an axis takes one value, not a structure: reduce its parts one by one")
        (leaf,) = extended.engine.contributions(op, [value], form)
    values = leaf.values if isinstance(leaf, PerReplica) else (leaf,)
    like = values[0]
    with structures.refusals("all_reduce", topology, options.timeout_seconds):
        exact = op in (ReduceOp.SUM, ReduceOp.MEAN) and options.algorithm == "exact"
        exact = exact and accumulator(arrays.to_host(like).dtype, op).kind in "fc"  # integers are not rounded
        of_each = [] if exact else [_local_parts(op, value, axis) for value in values]
    if exact:
        is_mirrored = isinstance(value, Mirrored)
        topology = SingleRankTopology() if is_mirrored else topology
        # A plain value stands for each replica of this rank, a mirrored one for all replicas at once.
        copies = 1 if is_mirrored or len(values) > 1 else extended.engine.replicas.count
        whole = _along(values * copies, axis)
        total, count = _exact_parts(topology, op, whole, axis, options.timeout_seconds)
        return sum_of_parts(total, like) if op is ReduceOp.SUM else mean_of_parts(total, count, like)
    parts: list[Any] = of_each[0] if len(values) == 1 else [*map(PerReplica, zip(*of_each, strict=True))]
    if op in (ReduceOp.SUM, FurtherOp.PROD):
        return sum_of_parts(extended.engine.all_reduce(op, parts, None, form)[0], like=like)
    if not isinstance(value, Mirrored):  # a Mirrored value: the mean over all replicas is the mean of one
        # For MAX and MIN the values are reduced by the op. The counts behind them are summed.
        extremes = [] if op is ReduceOp.MEAN else extended.engine.all_reduce(op, [parts.pop(0)], None, form)
        parts = extremes + extended.engine.all_reduce(ReduceOp.SUM, parts, None, form)
    if op is ReduceOp.MEAN:
        return mean_of_parts(parts[0], parts[1], like=like)
    if not parts[1]:
        raise ValueError(f"{form}: the axis has no values on any replica")
    return in_library_of(parts[0], like=like)


def _along(values: Sequence[Any], axis: Axis) -> Any:
    """Return the values of several replicas as one, along an axis that is reduced: the order does not matter."""
    if len(values) == 1:
        return values[0]
    first = axis if isinstance(axis, int) else axis[0]
    return np.concatenate([*map(arrays.to_host, values)], first)


def _one_array(values: list[Any]) -> np.ndarray:
    try:
        return arrays.as_numpy(values)
    except ValueError as error:
        raise ValueError(f"reduce over an axis takes a list as one array, but {error}") from None


def _local_parts(op: Op, leaf: Any, axis: Axis) -> list[Any]:
    if op in (FurtherOp.MAX, FurtherOp.MIN):
        return local_extreme(leaf, axis, op)
    total = local_sum(leaf, axis, op)
    if op is not ReduceOp.MEAN:
        return [total]
    return [total, np.array(examples(arrays.numpy_or_cupy(leaf), axis), np.int64)]


def _exact_parts(
    topology: Topology, op: Op, value: Any, axis: Axis, timeout_seconds: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum and the number of examples over an axis of all replicas; for MEAN in double precision."""
    array = arrays.to_host(value)
    wide = accumulator(array.dtype, op)
    if wide.char not in "fdFD":
        raise TypeError(f"no exact sum of {array.dtype}: cast it to float64 or complex128")
    double = np.dtype(np.complex128 if wide.kind == "c" else np.float64)
    result = double if op is ReduceOp.MEAN else wide
    return exact_sum_over_axis(topology, array.astype(wide, copy=False), axis, result, timeout_seconds)


def local_sum(value: Any, axis: Axis, op: Op) -> Any:
    """Return the sum over an axis, for PROD the product, in the dtype that ``op`` adds in.

    Raise ValueError if the axis is out of range, and TypeError if the value is bool or not numeric.
    """
    array, wide = _array(value, axis, op)
    wider = array.astype(wide, copy=False)
    total = wider.prod(axis=axis) if op is FurtherOp.PROD else wider.sum(axis=axis)
    return np.asarray(total) if type(array) is np.ndarray else total


def local_extreme(value: Any, axis: Axis, op: Op) -> list[Any]:
    """Return the maximum or minimum over an axis, a neutral value without examples, and their number."""
    array, _ = _array(value, axis, op)
    count = examples(array, axis)
    if count:
        extreme = array.max(axis=axis) if op is FurtherOp.MAX else array.min(axis=axis)
    else:
        # NumPy has no maximum of no values: `sum` gives the shape that is left.
        shape = array.sum(axis=axis).shape
        extreme = type(array)(shape, array.dtype)
        extreme[...] = _neutral(array.dtype, op)
    return [np.asarray(extreme) if type(array) is np.ndarray else extreme, np.array(count, np.int64)]


def _array(value: Any, axis: Axis, op: Op) -> tuple[Any, np.dtype]:
    """Return a value as an array, and the dtype that ``op`` adds in."""
    array = arrays.numpy_or_cupy(value)
    wide = accumulator(array.dtype, op)
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
    half = dtype.kind not in "iu" and accumulator(dtype, ReduceOp.SUM).itemsize > dtype.itemsize
    return in_library_of(total.astype(result_dtype(dtype, ReduceOp.SUM)) if half else total, like)


def mean_of_parts(total: Any, count: np.ndarray, like: Any) -> Any:
    """Return the mean over all examples of all replicas, in the dtype and library of ``like``; nan without examples."""
    dtype = arrays.numpy_or_cupy(like).dtype
    mean = divide(total, count[()])
    if not arrays.on_gpu(mean):
        mean = np.asarray(mean)
    return in_library_of(mean.astype(result_dtype(dtype, ReduceOp.MEAN), copy=False), like)


def in_library_of(result: Any, like: Any) -> Any:
    """Return a result in the library of ``like``."""
    if arrays.on_gpu(result):
        return arrays.from_cupy(result, like)
    return result[()] if isinstance(like, (np.ndarray, np.generic)) else arrays.from_host(result, like)


# --- exact sums -----------------------------------------------------------------


_OUTPUTS = 32 << 10  # summed together
_BLOCK = 64 << 10  # elements whose digits stay in the cache
_FEW_OUTPUTS = 64  # fewer are summed faster in Fortran order, where the values of one output are contiguous


def exact_sum_over_axis(
    topology: Topology,
    array: np.ndarray,
    axis: int | tuple[int, ...],
    dtype: np.dtype,
    timeout_seconds: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum over some axes of all ranks' arrays, and the number of their examples. Collective.

    The lengths of these axes may differ between ranks. ``dtype`` is the dtype of the sum, of the array's kind. Raise
    ValueError if the array does not have the axes, and on every rank if the other axes differ between ranks.
    """
    axes = axis if isinstance(axis, tuple) else (axis,)
    moved = np.moveaxis(array, axes, range(len(axes)))
    examples, rest = math.prod(moved.shape[: len(axes)]), moved.shape[len(axes) :]
    values = moved.reshape(examples, math.prod(rest))
    total = np.empty(rest, dtype)
    flat = total.reshape(-1)
    count = np.array([examples], np.int64)
    if array.dtype.kind == "c":
        # The sum of complex numbers is exact in both parts.
        values = np.ascontiguousarray(values).view(array.real.dtype)
        flat = flat.view(total.real.dtype)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        if topology.size == 1:
            for part in _parts(len(flat)):
                exact_sum(_blocks(values[:, part]), flat[part], examples)
            return total, count[0]

        def exchange(ufunc: np.ufunc, array: np.ndarray) -> None:
            algorithm, _, piece_bytes = Choice.of(topology).best(array.nbytes, array.dtype)
            step = max(1, piece_bytes // array.itemsize)
            for start in range(0, len(array), step):
                piece = array[start : start + step]
                algorithm.reduce(topology, ufunc, piece, piece)

        described = operation("all_reduce", "exact", "over an axis to", (dtype, rest))
        with topology.lock.collective(described, False, timeout_seconds):
            exchange(np.add, count)  # first: the number of all examples decides how wide the digits of a sum are
            for part in _parts(len(flat)):
                exact_sum(_blocks(values[:, part]), flat[part], int(count[0]), exchange)
    return total, count[0]


def _parts(length: int) -> list[slice]:
    return [slice(start, min(start + _OUTPUTS, length)) for start in range(0, length, _OUTPUTS)]


def _blocks(values: np.ndarray) -> list[np.ndarray]:
    examples, outputs = values.shape
    if outputs < min(examples, _FEW_OUTPUTS):
        values = np.asfortranarray(values)
    step = max(1, _BLOCK // outputs)
    return [values[start : start + step] for start in range(0, max(1, examples), step)]
