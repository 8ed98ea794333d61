"""The reductions of torch by those of this library."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpistrat.collectives.arithmetic.operations import FurtherOp, Op
from mpistrat.integrations.torch.tensors import BYTES_ONLY
from mpistrat.values import ReduceOp

_OPS: dict[str, Op] = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.MEAN,
    "PRODUCT": FurtherOp.PROD,
    "MIN": FurtherOp.MIN,
    "MAX": FurtherOp.MAX,
}
# Of bools: a sum or a maximum is "any", a product or a minimum is "all", as with NCCL.
_OF_BOOLS: dict[str, Op] = {
    "SUM": FurtherOp.MAX,
    "MAX": FurtherOp.MAX,
    "BOR": FurtherOp.MAX,
    "PRODUCT": FurtherOp.MIN,
    "MIN": FurtherOp.MIN,
    "BAND": FurtherOp.MIN,
}
_BITWISE: dict[str, np.ufunc] = {
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def op_of(options: Any) -> Any:
    """Return the reduction of torch in the options of a call, by default SUM."""
    return torch.distributed.ReduceOp.SUM if options is None else options.reduceOp


def is_integer_mean(op: Any, dtype: torch.dtype) -> bool:
    """Return whether a reduction is the mean of integers: their sum, divided and rounded towards 0, as NCCL does."""
    return _member(op).name == "AVG" and not (dtype.is_floating_point or dtype.is_complex)


def divided(total: np.ndarray, ranks: int) -> np.ndarray:
    """Return a sum divided by the number of ranks, integers rounded towards 0. May change ``total``."""
    if total.dtype.kind not in "iu":
        return np.asarray(total / ranks, total.dtype)
    total += (total < 0) * np.array(
        ranks - 1, total.dtype
    )  # the sum fits: |total| is at most ranks times the largest
    total //= ranks
    return total


def _member(op: Any) -> Any:
    # A ReduceOp has a member and an operand; the members themselves are of another class.
    return op.__getstate__()[0] if type(op) is torch.distributed.ReduceOp else op


def reduction(op: Any, dtype: torch.dtype) -> Op | np.ufunc:
    """Return the reduction of this library for one of torch, or the ufunc of a bitwise one.

    Raises
    ------
    NotImplementedError
        If the op has none.
    TypeError
        If it is not defined for the dtype.
    """
    name = _member(op).name
    if name not in _OPS and name not in _BITWISE:
        raise NotImplementedError(
            f"{name} is not among the reductions of mpistrat: {', '.join((*_OPS, *_BITWISE))}; scale the tensor and "
            "use SUM"
        )
    if dtype in BYTES_ONLY:
        raise TypeError(
            f"{name} of {dtype} is not defined: tensors of this dtype are moved only; cast to bfloat16"
        )
    if dtype is torch.bool:
        if name not in _OF_BOOLS:
            raise TypeError(f"{name} of torch.bool is not defined: cast to an integer")
        return _OF_BOOLS[name]
    if (dtype.is_floating_point or dtype.is_complex) and name in _BITWISE:
        raise TypeError(f"{name} of {dtype} is not defined: bitwise reductions are for integers")
    return _BITWISE.get(name) or _OPS[name]
