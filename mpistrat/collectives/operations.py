"""The reductions by which values of replicas can be combined: dtypes, precision, and the division that ends a mean."""

from __future__ import annotations

import enum
from functools import lru_cache
from typing import Any

import numpy as np

from mpistrat.values import ReduceOp


class FurtherOp(enum.Enum):
    """Reductions in addition to `ReduceOp`. MAX and MIN are NaN where a value is NaN."""

    MAX = "MAX"
    MIN = "MIN"
    PROD = "PROD"

    __hash__ = object.__hash__


Op = ReduceOp | FurtherOp

COMBINE: dict[Op, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    FurtherOp.MAX: np.maximum,
    FurtherOp.MIN: np.minimum,
    FurtherOp.PROD: np.multiply,
}
_FURTHER = {op.name: op for op in FurtherOp}


def parse_op(op: Any) -> Op:
    """Return the reduction with this name. Raise ValueError for another name and TypeError otherwise, as
    `ReduceOp.parse`.
    """
    if type(op) is FurtherOp:
        return op
    if isinstance(op, str) and op.upper() in _FURTHER:
        return _FURTHER[op.upper()]
    return ReduceOp.parse(op)


def divide(total: Any, count: Any, out: Any = None) -> Any:
    """Return ``total / count`` for a count of replicas or examples; written to ``out`` if given, also ``total``.

    The parts of complex numbers are divided one by one: a product of complex numbers makes ``(inf + 2j) / 1`` a nan.

    >>> divide(np.array([complex(np.inf, 2)]), 2)
    array([inf+1.j])
    """
    kind = total.dtype.kind
    if kind == "c":
        if out is None:
            out = total.copy()
        divide(total.real, count, out.real)
        divide(total.imag, count, out.imag)
        return out
    divisor = count if kind in "iu" else total.dtype.type(count)
    return np.divide(total, divisor) if out is None else np.divide(total, divisor, out)


def finish(wide: Any, divisor: int, total: Any) -> None:
    """Write a combination to ``total``, divided for a mean, in its dtype. A floating ``wide`` is changed."""
    if divisor != 1:
        if wide.dtype.kind in "iu":
            divide(wide, divisor, total)
            return
        divide(wide, divisor, wide)
    if wide is not total:
        total[...] = wide


# --- dtypes ---------------------------------------------------------------------


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
def result_dtype(dtype: np.dtype, op: Op) -> np.dtype:
    """Return the dtype of the result: the dtype of the values, but float64 for the mean of integers."""
    if op is ReduceOp.MEAN and dtype.kind in "iu":
        return np.dtype(np.float64)
    return dtype if dtype.isnative else dtype.newbyteorder("=")
