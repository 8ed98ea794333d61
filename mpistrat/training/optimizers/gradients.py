"""The gradients that a program gives to an optimizer: checks, copies of views of variables, and clipping."""

from __future__ import annotations

import functools
import math
import operator
import sys
import warnings
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.arrays.device import cupy_for
from mpistrat.arrays.gpu import kernels
from mpistrat.process.own_files import level_of_program
from mpistrat.representation import few, require
from mpistrat.runtime.agreement.operation import Checksum
from mpistrat.values import IndexedSlices, component
from mpistrat.variables import Variable

if TYPE_CHECKING:
    from mpistrat.strategy import StrategyExtended

Pairs = list[tuple[Any, Variable]]
_checked_code: set[CodeType] = set()
_SHOWN = 4  # names of variables in a message


def as_pair(pair: Any) -> tuple[Any, Any]:
    """Return a gradient and its variable."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            f"apply_gradients takes pairs (gradient, variable), not {pair!r}: write zip(gradients, variables)"
        )
    gradient, variable = pair
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
        if np.isnan(arrays.to_host(_values(gradient))).any():
            raise FloatingPointError(
                f"replica {replica}, step {step}: the gradient of variable {variable.name!r} has NaN, as would "
                "the sum. Look at the batch of this replica, and for divisions by zero, logarithms and roots"
            )


def _warn_of_means(replicas: int) -> None:
    """Warn if the function of the program that applies gradients, or one that it calls, takes a mean."""
    level = level_of_program()
    frame = sys._getframe(level - 1)
    code = frame.f_code
    # Once for each function of a program: this is called in every step.
    if code in _checked_code:
        return
    _checked_code.add(code)
    known = {**frame.f_globals, **frame.f_locals}
    called = (known.get(name) for name in (*code.co_names, *code.co_freevars))
    if any("mean" in c.co_names for c in (code, *(f.__code__ for f in called if isinstance(f, FunctionType)))):
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


def form_of(
    names: Sequence[Hashable], dtypes: Sequence[np.dtype], shapes: Sequence[tuple[int, ...]]
) -> tuple[str, Checksum]:
    """Return a checksum for the ranks to compare: the hash of many names would take as long as a message."""
    compared = repr([*names, *map(str, dtypes), *shapes])
    return f"of {few([*map(str, names)], _SHOWN)}", Checksum(f"{zlib.crc32(compared.encode()):08x}")


def fitting_pairs(extended: StrategyExtended, all_pairs: Pairs) -> Pairs:
    """Return the pairs that have a gradient, each of them `fitting` its variable.

    Raise ValueError if there is none, if a variable belongs to another strategy, and as `fitting`. Raise TypeError for
    what is not a variable.
    """
    pairs = [pair for pair in all_pairs if pair[0] is not None]
    if not pairs:
        raise ValueError("No gradients provided for any variable")
    for _, variable in pairs:
        extended.check_variable(variable, "apply_gradients")
    return [(fitting(gradient, variable), variable) for gradient, variable in pairs]


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


def memory_spans(changed: Iterable[np.ndarray]) -> np.ndarray:
    """Return the addresses of contiguous arrays that do not overlap, for `copy_overlapping`."""
    return np.array(sorted(_span(array) for array in changed if array.size), np.uint64).reshape(-1, 2)


def copy_overlapping(gradients: Sequence[Any], spans: np.ndarray) -> list[Any]:
    """Return gradients, copied where they overlap memory that a step changes.

    ``spans`` are its `memory_spans`. A step changes its variables one after another. A gradient that is a view of one
    of them must not change before it is used.
    """
    summed = []
    for gradient in gradients:
        plain = component(gradient)
        rows = isinstance(plain, IndexedSlices)
        values = plain.values if rows else plain
        if not arrays.on_gpu(values):
            array = arrays.to_host(values)
            first, end = _span(array) if array.size else (0, 0)
            before = spans[:, 0].searchsorted(np.uint64(end))  # as many begin before the gradient ends
            if before and spans[before - 1, 1] > first:
                copied = array.copy()
                gradient = IndexedSlices(copied, plain.indices, plain.dense_shape) if rows else copied
        summed.append(gradient)
    return summed


def _span(array: np.ndarray) -> tuple[int, int]:
    """Return the address of the first byte of an array, and of the one past its last."""
    first = last = array.__array_interface__["data"][0]
    for length, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            first += (length - 1) * stride
        else:
            last += (length - 1) * stride
    return first, last + array.itemsize


BLOCK = 1 << 15  # real numbers that are squared together; another number would change the last bits of norms


class Clipping:
    """Limits of the gradients of a step. At most one is set.

    ``clipnorm`` limits the norm of each gradient, ``clipvalue`` the absolute value of each element, and
    ``global_clipnorm`` the norm of all gradients together. Raise ValueError if two are set, or one is not positive.
    """

    def __init__(self, clipnorm: float | None, clipvalue: float | None, global_clipnorm: float | None):
        limits = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
        self.limits = {name: limit for name, limit in limits.items() if limit is not None}
        require(len(self.limits) <= 1, "only one of clipnorm, clipvalue and global_clipnorm may be set", self.limits)
        for name, limit in self.limits.items():
            require(limit > 0, f"{name} must be positive", limit)
        self._norm, self._value, self._global_norm = limits.values()

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the clipped gradients. Those given are not changed, and are returned where no limit is exceeded.

        The result has the same bits on all replicas that give the same bits on one kind of device.
        """
        gradients = [_as_arrays(gradient) for gradient in gradients]
        squares = squared_norms([_values(gradient) for gradient in gradients]) if self.by_norm else []
        return self.clipped(gradients, self.norms(squares))

    @property
    def by_norm(self) -> bool:
        """Whether a norm is limited."""
        return self._value is None

    def norms(self, squares: Sequence[float]) -> list[float]:
        """Return the norm that is limited for each gradient of a step, from its `squared_norms`."""
        if self._global_norm is not None:
            # fsum is exact: the norm does not depend on the order of the variables.
            squares = [math.fsum(squares)] * len(squares)
        return [*map(math.sqrt, squares)]

    def clipped(self, gradients: Sequence[Any], norms: Sequence[float]) -> list[Any]:
        """Return clipped gradients, or parts of them. ``norms`` has a norm for each, and is empty without `by_norm`."""
        limit = self._value or self._norm or self._global_norm
        assert limit is not None
        if self._value is not None:
            return [_changed(gradient, lambda values: _within(values, limit)) for gradient in gradients]
        return [
            gradient if norm <= limit else _scaled(gradient, limit / norm)
            for gradient, norm in zip(gradients, norms, strict=True)
        ]


def squared_norms(values: Sequence[Any]) -> list[float]:
    """Return the sum of the squared absolute values of each array, computed in float64.

    The order of the additions depends on the sizes alone, so that ranks with other processors get the same bits. BLAS
    does not promise that.
    """
    # The squared absolute value of a complex number is the sum of the squares of its two parts.
    values = [value.reshape(-1).view(value.real.dtype) if value.dtype.kind == "c" else value for value in values]
    norms = [0.0] * len(values)
    on_gpu: dict[np.dtype, list[int]] = {}
    for i, value in enumerate(values):
        if arrays.on_gpu(value) and value.dtype.name in kernels.FLOATS:
            on_gpu.setdefault(value.dtype, []).append(i)
        else:
            norms[i] = added(squares_of_blocks(np.ascontiguousarray(arrays.to_host(value)).reshape(-1)))
    for members in on_gpu.values():
        on_device = [cupy_for("a norm").ascontiguousarray(values[i]) for i in members]
        for i, norm in zip(members, kernels.squared_norms(on_device), strict=True):
            norms[i] = norm
    return norms


def squares_of_blocks(flat: np.ndarray) -> Iterator[float]:
    """Yield the sum of the squares of each `BLOCK` of a flat array of real numbers on the host."""
    for start in range(0, flat.size, BLOCK):
        wide = flat[start : start + BLOCK].astype(np.float64)
        np.multiply(wide, wide, out=wide)
        yield float(np.add.reduce(wide))


def added(numbers: Iterable[float]) -> float:
    """Return the sum in this order. Since Python 3.12 the built-in function has other bits."""
    return functools.reduce(operator.add, numbers, 0.0)


def _as_arrays(gradient: Any) -> Any:
    """Return a gradient as an array, or as rows with different indices."""
    if not isinstance(gradient, IndexedSlices):
        return arrays.numpy_or_cupy(gradient)
    # The norm is of the gradient, in which rows with one index are added.
    indices, inverse = np.unique(arrays.to_host(gradient.indices), return_inverse=True)
    rows = np.zeros((len(indices), *gradient.values.shape[1:]), gradient.values.dtype)
    np.add.at(rows, inverse, arrays.to_host(gradient.values))
    return IndexedSlices(arrays.from_host(rows, gradient.values), indices, gradient.dense_shape)


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, IndexedSlices) else gradient


def _changed(gradient: Any, change: Callable[[Any], Any]) -> Any:
    """Return a gradient whose values are changed by a function of NumPy or CuPy arrays."""
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(_changed(gradient.values, change), gradient.indices, gradient.dense_shape)
    if arrays.on_gpu(gradient) and gradient.dtype.kind not in "fc":  # bfloat16 is bits there
        return arrays.from_host(change(arrays.to_host(gradient)), gradient)
    return change(gradient)


def _scaled(gradient: Any, factor: float) -> Any:
    return _changed(gradient, lambda values: (values * factor).astype(values.dtype, copy=False))


def _within(values: Any, limit: float) -> Any:
    if values.dtype.kind == "c":
        raise ValueError(f"clipvalue cannot clip a gradient of {values.dtype}: use clipnorm")
    return values.clip(-limit, limit).astype(values.dtype, copy=False)
