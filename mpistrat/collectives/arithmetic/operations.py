"""The reductions by which values of replicas can be combined, and the division that ends a mean."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from mpistrat.values import ReduceOp


class FurtherOp(enum.Enum):
    """Reductions in addition to those of `ReduceOp`. MAX and MIN are NaN where a value is NaN."""

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
