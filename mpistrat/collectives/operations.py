"""What the replicas' values can be combined by."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from mpistrat.values import ReduceOp


class FurtherOp(enum.Enum):
    """Combinations that `CrossDeviceOps` offers beyond those of `ReduceOp`.

    Attributes
    ----------
    MAX, MIN
        The largest, the smallest; not a number where one is.
    PROD
        The product.

    Examples
    --------
    >>> parse_op("max")
    <FurtherOp.MAX: 'MAX'>
    """

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
    """The combination of that name, as `ReduceOp.parse`.

    Raises
    ------
    ValueError
        If there is none of that name.
    TypeError
        If ``op`` is no name and no combination.
    """
    if type(op) is FurtherOp:
        return op
    if isinstance(op, str) and op.upper() in _FURTHER:
        return _FURTHER[op.upper()]
    return ReduceOp.parse(op)
