"""Variables of one process: plain ones, and one replica's copy of a distributed variable, on the host or a GPU."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.arrays.device import Device, on_device
from mpistrat.arrays.gpu import pinned
from mpistrat.values import IndexedSlices, component
from mpistrat.variables.variable import Variable

LEAST_ALONE = 64 << 10  # bytes: from this size on the cost of a call does not matter
_BLOCK = 1 << 20  # bytes; pages that no variable uses stay unallocated

_lock = threading.Lock()
_blocks: dict[Hashable, tuple[np.ndarray, int]] = {}  # the block that is being filled, and its used elements


def placed_beside(value: np.ndarray, kind: Hashable) -> np.ndarray:
    """Return a copy of a small array behind the last one of its dtype and kind, or a large array itself.

    An array keeps its memory for life, so that views stay valid, and its block with it.
    """
    if not 0 < value.nbytes < LEAST_ALONE:
        return value
    key = value.dtype, kind
    with _lock:
        block, used = _blocks.get(key) or (np.empty(0, value.dtype), 0)
        if used + value.size > block.size:
            # The rest of the last block stays unused: its pages take no memory.
            block, used = np.empty(_BLOCK // value.itemsize, value.dtype), 0
        _blocks[key] = block, used + value.size
    array = block[used : used + value.size].reshape(value.shape)
    array[...] = value
    return array


def follows(last: np.ndarray, array: np.ndarray) -> bool:
    """Return whether an array begins where ``last`` ends, in the same memory."""
    return (
        last.base is not None
        and last.base is array.base
        and pinned.address(array) == pinned.address(last) + last.nbytes
    )


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return contiguous arrays, each of which `follows` the one before, as one flat array on their memory."""
    first = arrays[0]
    if len(arrays) == 1:
        return first.reshape(-1)
    assert isinstance(first.base, np.ndarray)
    start = (pinned.address(first) - pinned.address(first.base)) // first.itemsize
    return first.base[start : start + sum(array.size for array in arrays)]


_NUMBERS = {int, float, complex}
_OF_NUMBERS = tuple(map(np.dtype, (np.int64, np.float64, np.complex128)))  # NumPy's dtypes for _NUMBERS


class LocalVariable(Variable):
    """A variable whose reads and writes stay in this process.

    The default strategy and `OneDeviceStrategy` make variables of this class. Update functions get this replica's copy
    of a distributed variable as a `LocalVariable`. ``array`` is the value, not a copy: writes change the variable.
    """

    array: Any

    def _initialize(self, value: np.ndarray) -> None:
        self.array = placed_beside(value, self._trainable)

    @classmethod
    def copy_of(cls, variable: Variable, value: np.ndarray, container: Any, replica: int) -> LocalVariable:
        """Return the component of a distributed variable. ``container`` is a weak reference to ``variable``."""
        copy = cls.without_value(variable, container, replica)
        copy.array = value
        return copy

    def _hold_copy_of(self, variable: LocalVariable) -> None:
        self.array = variable.array.copy()

    def _read(self) -> np.ndarray:
        return self.array

    def own_copy(self) -> np.ndarray:
        return self.array

    def write(self, method: str, value: Any) -> None:
        _WRITES[method](self, value)

    def _write_result(self, result: Any) -> None:
        self.array[...] = result

    def __setitem__(self, key: Any, value: Any) -> None:
        arrays.refuse_masked(key)
        self.array[key] = arrays.numpy_or_cupy(component(value))

    def fitting(self, value: Any) -> np.ndarray:
        """Return ``value`` as an array that can be written to this variable.

        Raise ValueError for another shape or an integer out of range, and TypeError if the dtype cannot be cast.
        """
        target = self.array
        # Fast path, by the identity of the dtype: most gradients and sums are of the variable's own.
        if type(value) is np.ndarray and value.dtype is target.dtype and value.shape == target.shape:
            return value
        value = component(value)
        if type(value) in _NUMBERS:
            array = self._number(value)
        elif isinstance(value, (list, tuple)):
            array = self._numbers(value)
        else:
            array = arrays.as_numpy(value)
        self._check_value(array)
        return array

    def _number(self, value: Any) -> np.ndarray:
        """Convert a Python number to the variable's dtype."""
        dtype = self.array.dtype
        if isinstance(value, int) and dtype.kind in "iu":
            limits = np.iinfo(dtype)
            if not limits.min <= value <= limits.max:
                raise ValueError(f"variable {self.name!r} has dtype {dtype}, which cannot hold {value}")
        elif not np.can_cast(np.asarray(value).dtype, dtype, "same_kind"):
            # Not cast: `_check_value` raises, and names the dtype of the value.
            return np.asarray(value)
        return np.asarray(value, dtype)

    def _numbers(self, value: list[Any] | tuple[Any, ...]) -> np.ndarray:
        """Convert a sequence of Python numbers to the variable's dtype."""
        array, dtype = arrays.as_numpy(value), self.array.dtype
        if array.dtype not in _OF_NUMBERS or not np.can_cast(array.dtype, dtype, "same_kind"):
            return array
        if dtype.kind in "iu" and array.size:
            # If the smallest and the largest fit, all do.
            for extreme in (array.min(), array.max()):
                self._number(int(extreme))
        return array.astype(dtype)

    def _fitting_rows(self, rows: IndexedSlices) -> tuple[np.ndarray, np.ndarray]:
        self.check_rows(rows)
        return arrays.to_host(rows.indices), arrays.to_host(rows.values).astype(self.array.dtype, copy=False)


def _assign(variable: LocalVariable, value: Any) -> None:
    variable.array[...] = variable.fitting(value)


def _assign_add(variable: LocalVariable, value: Any) -> None:
    target = variable.array
    if type(value) is np.ndarray and value.dtype is target.dtype and value.shape == target.shape:
        np.add(target, value, target)  # fast path: skips the checks of `fitting`
    else:
        np.add(target, variable.fitting(value), out=target, casting="unsafe")  # `fitting` has checked the cast


def _assign_sub(variable: LocalVariable, value: Any) -> None:
    target = variable.array
    np.subtract(target, variable.fitting(value), out=target, casting="unsafe")


def _scatter_by(ufunc: np.ufunc) -> Callable[[LocalVariable, Any], None]:
    def scatter(variable: LocalVariable, rows: Any) -> None:
        indices, values = variable._fitting_rows(rows)
        # `at`, since `array[indices] += values` counts a repeated index once.
        ufunc.at(variable.array, indices, values)

    return scatter


def _scatter_div(variable: LocalVariable, rows: Any) -> None:
    indices, values = variable._fitting_rows(rows)
    divide = np.floor_divide if variable.dtype.kind in "iu" else np.true_divide
    divide.at(variable.array, indices, values)


def _scatter_update(variable: LocalVariable, rows: Any) -> None:
    indices, values = variable._fitting_rows(rows)
    variable.array[indices] = values


_WRITES: dict[str, Callable[[LocalVariable, Any], None]] = {
    "assign": _assign,
    "assign_add": _assign_add,
    "assign_sub": _assign_sub,
    "scatter_add": _scatter_by(np.add),
    "scatter_sub": _scatter_by(np.subtract),
    "scatter_mul": _scatter_by(np.multiply),
    "scatter_min": _scatter_by(np.minimum),
    "scatter_max": _scatter_by(np.maximum),
    "scatter_div": _scatter_div,
    "scatter_update": _scatter_update,
}


# --- on a GPU -------------------------------------------------------------------


class GpuVariable(LocalVariable):
    """A `LocalVariable` whose array is a CuPy array. Values to write may be CuPy or NumPy arrays."""

    def _initialize(self, value: np.ndarray) -> None:
        self.array = arrays.placed(value, self._engine.variable_device)

    def __cupy_get_ndarray__(self) -> Any:
        """Return the array for CuPy's functions. With CUDA's interface they wait for the stream; no bfloat16."""
        return self.array

    def fitting(self, value: Any) -> Any:
        target, value = self.array, component(value)
        if type(value) is type(target) and value.dtype == target.dtype and value.shape == target.shape:
            return value
        if arrays.on_gpu(value):
            array = arrays.to_cupy(value)
            self._check_value(array)
            return array.astype(target.dtype, copy=False)
        host = super().fitting(value).astype(target.dtype, copy=False)
        return pinned.upload(host, arrays.device_of(target).index)

    def __setitem__(self, key: Any, value: Any) -> None:
        arrays.refuse_masked(key)
        self.array[key] = arrays.placed(component(value), arrays.device_of(self.array))

    def write(self, method: str, value: Any) -> None:
        with on_device(self.array.device.id):
            if method in _ARITHMETIC:
                _ARITHMETIC[method](self.array, self.fitting(value))
            else:
                self._write_rows(method, value)

    def _write_rows(self, method: str, rows: IndexedSlices) -> None:
        """Update the rows on the host: a GPU's atomic operations have another order on every replica."""
        host = IndexedSlices(arrays.to_host(rows.values), arrays.to_host(rows.indices))
        self.check_rows(host)
        # Each row once, also where indices are repeated: the host applies them in order.
        touched, positions = np.unique(host.indices, return_inverse=True)
        if not len(touched):
            return
        index = pinned.upload(touched, arrays.device_of(self.array).index)
        here = LocalVariable.copy_of(self, arrays.to_host(self.array[index]), None, 0)
        here.write(method, IndexedSlices(host.values, positions.reshape(-1)))
        self.array[index] = arrays.from_host(here.array, self.array)


def kind_on(device: Device) -> type[LocalVariable]:
    """Return the kind of the variables that live on a device."""
    return LocalVariable if device.kind == "cpu" else GpuVariable


_ARITHMETIC: dict[str, Callable[[Any, Any], object]] = {
    "assign": lambda array, value: operator.setitem(array, ..., value),
    "assign_add": operator.iadd,
    "assign_sub": operator.isub,
}
