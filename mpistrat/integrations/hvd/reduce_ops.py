"""Horovod's reductions, and those of this library that serve them."""

from __future__ import annotations

import enum
import warnings

from mpistrat.collectives.arithmetic.operations import FurtherOp
from mpistrat.collectives.arithmetic.operations import Op as OwnOp
from mpistrat.process.own_files import level_of_program
from mpistrat.values import ReduceOp


class Op(enum.Enum):
    """How the values of all ranks are combined. The module has each of them by its name.

    Attributes
    ----------
    Average, Sum, Min, Max, Product
        The reductions.
    Adasum
        A sum that adds parallel vectors as their mean and orthogonal ones as they are.

    Examples
    --------
    >>> import mpistrat.integrations.hvd as hvd
    >>> hvd.Average
    <Op.Average: 'Average'>
    """

    Average = "Average"
    Sum = "Sum"
    Min = "Min"
    Max = "Max"
    Product = "Product"
    Adasum = "Adasum"


Average, Sum, Min, Max, Product, Adasum = Op


OWN: dict[Op, OwnOp] = {
    Sum: ReduceOp.SUM,
    Average: ReduceOp.MEAN,
    Min: FurtherOp.MIN,
    Max: FurtherOp.MAX,
    Product: FurtherOp.PROD,
}


def op_of(op: Op | None, average: bool | None) -> Op:
    """Return the reduction that a call asks for, by default Average. ``average`` is a former argument.

    Raise ValueError if both are given, and TypeError if ``op`` is not one of the reductions.
    """
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("`average` has been replaced by `op`", DeprecationWarning, stacklevel=level_of_program())
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, Op):
        raise TypeError(f"op must be one of {', '.join(each.name for each in Op)} of this module, not {op!r}")
    return op
