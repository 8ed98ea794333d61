"""Checks of the gradients that a program gives to an optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.runtime import arrays
from mpistrat.values import IndexedSlices, component
from mpistrat.variables import Variable

Pairs = list[tuple[Any, Variable]]


def names_of(pairs: Pairs) -> tuple[str, ...]:
    """Return the names of the variables with and without gradients, for the ranks to compare."""
    return tuple(
        [
            f"no gradient of {getattr(variable, 'name', '')}" if gradient is None else variable.name
            for gradient, variable in pairs
        ]
    )


def fitting(gradient: Any, variable: Variable) -> Any:
    """Return a gradient that fits its variable.

    Raises
    ------
    ValueError
        If the shape differs, the dtype cannot be cast, or an index is out of range.
    TypeError
        If the dtype of rows cannot be cast.
    """
    gradient = component(gradient)
    if isinstance(gradient, IndexedSlices):
        variable.check_rows(gradient)
        return gradient
    array = arrays.numpy_or_cupy(gradient)
    if array.shape != variable.shape:
        raise ValueError(
            f"variable {variable.name!r} has shape {variable.shape}, and its gradient {array.shape}"
        )
    if not np.can_cast(array.dtype, variable.dtype, "same_kind"):
        raise ValueError(
            f"variable {variable.name!r} has dtype {variable.dtype}, and its gradient {array.dtype}: cast it"
        )
    return gradient
