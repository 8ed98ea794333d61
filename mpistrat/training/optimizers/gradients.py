"""What a program gives to an optimizer as gradients: checks, and copies of what the step would change."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.process.own_files import level_of_program
from mpistrat.values import IndexedSlices, component
from mpistrat.variables import Variable

Pairs = list[tuple[Any, Variable]]
_looked_at: set[CodeType] = set()


def as_pair(each: Any) -> tuple[Any, Any]:
    """Return a gradient and its variable."""
    if not isinstance(each, (tuple, list)) or len(each) != 2:
        raise TypeError(
            f"apply_gradients takes pairs (gradient, variable), not {each!r}: write zip(gradients, variables)"
        )
    gradient, variable = each
    if isinstance(gradient, Variable) and not isinstance(variable, Variable):
        raise TypeError(
            f"apply_gradients takes pairs (gradient, variable), and got the variable {gradient.name!r} first: write "
            "zip(gradients, variables), in this order"
        )
    return gradient, variable


def checked(
    variables: Sequence[Variable], gradients: Sequence[Any], replica: int, replicas: int, step: int, aggregate: bool
) -> None:
    """Raise FloatingPointError if a gradient has NaN. Warn if it may be a mean, and is to be added to others."""
    if aggregate and replicas > 1:
        _warn_of_means(replicas)
    for variable, gradient in zip(variables, gradients, strict=True):
        values = gradient.values if isinstance(gradient, IndexedSlices) else gradient
        if np.isnan(arrays.to_host(values)).any():
            raise FloatingPointError(
                f"replica {replica}, step {step}: the gradient of variable {variable.name!r} has NaN, as would "
                "the sum. Look at the batch of this replica, and for divisions by zero, logarithms and roots"
            )


def _warn_of_means(replicas: int) -> None:
    """Warn if the function of the program that applies gradients, or one that it calls, takes a mean."""
    level = level_of_program()
    frame = sys._getframe(level - 1)
    code = frame.f_code
    if code in _looked_at:
        return
    _looked_at.add(code)
    known = {**frame.f_globals, **frame.f_locals}
    called = (known.get(name) for name in (*code.co_names, *code.co_freevars))
    if any("mean" in each.co_names for each in (code, *(f.__code__ for f in called if isinstance(f, FunctionType)))):
        warnings.warn(
            f"apply_gradients adds up the gradients of {replicas} replicas, and this function takes a mean. The mean "
            f"over the rows of one replica makes the step about {replicas} times too large: divide sums by the number "
            "of rows of the whole batch",
            RuntimeWarning,
            stacklevel=level,
        )


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

    Raise ValueError if the shape differs, the dtype cannot be cast, or an index is out of range. Raise TypeError if the
    dtype of rows cannot be cast.
    """
    gradient = component(gradient)
    if isinstance(gradient, IndexedSlices):
        variable.check_rows(gradient)
        return gradient
    variable = variable.part
    array = arrays.numpy_or_cupy(gradient)
    if array.shape != variable.shape:
        raise ValueError(
            f"variable {variable.name!r} has shape {variable.shape}, and its gradient {array.shape}: sum over the "
            "rows of the batch, or gradient.reshape(variable.shape)"
        )
    if not np.can_cast(array.dtype, variable.dtype, "same_kind"):
        raise ValueError(
            f"variable {variable.name!r} has dtype {variable.dtype}, and its gradient {array.dtype}: cast it"
        )
    return gradient


def places(changed: Iterable[np.ndarray]) -> np.ndarray:
    """Return where arrays lie that a step changes, for `apart`: contiguous ones that do not overlap."""
    spans = sorted(_span(array) for array in changed if array.size)
    return np.array(spans, np.uint64).reshape(-1, 2)


def apart(gradients: Sequence[Any], spans: np.ndarray) -> list[Any]:
    """Return gradients, with copies of those that may lie in memory that a step changes.

    ``spans`` are the `places` of what it changes. A step changes its variables one after another. A gradient that is a
    view of one of them must not change before it is used.
    """
    found = []
    for gradient in gradients:
        given = component(gradient)
        rows = isinstance(given, IndexedSlices)
        values = given.values if rows else given
        if not arrays.on_gpu(values):
            array = arrays.to_host(values)
            first, end = _span(array) if array.size else (0, 0)
            before = spans[:, 0].searchsorted(np.uint64(end))  # as many begin before the gradient ends
            if before and spans[before - 1, 1] > first:
                own = array.copy()
                gradient = IndexedSlices(own, given.indices, given.dense_shape) if rows else own
        found.append(gradient)
    return found


def _span(array: np.ndarray) -> tuple[int, int]:
    """Return the address of the first byte of an array, and of the one past its last."""
    first = last = array.__array_interface__["data"][0]
    for length, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            first += (length - 1) * stride
        else:
            last += (length - 1) * stride
    return first, last + array.itemsize
