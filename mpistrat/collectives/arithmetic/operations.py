"""The reductions by which the replicas' values can be combined."""

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
