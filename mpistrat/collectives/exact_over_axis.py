"""The exact sum over an axis of all ranks' arrays: the same bits for any distribution of the examples."""

from __future__ import annotations

import math

import numpy as np

from mpistrat.collectives.algorithms.choose import Choice
from mpistrat.collectives.algorithms.exact import exact_sum
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Topology

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

    The lengths of these axes may differ between ranks. ``dtype`` is that of the sum, of the array's kind. Raise
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
