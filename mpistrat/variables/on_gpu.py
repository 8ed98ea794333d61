"""Variables of one process, or one replica's copies, in GPU memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.arrays.device import Device, on_device
from mpistrat.arrays.gpu import pinned
from mpistrat.values import IndexedSlices, component
from mpistrat.variables.local import LocalVariable


class GpuVariable(LocalVariable):
    """A `LocalVariable` whose array is a CuPy array. Values to write may be CuPy or NumPy arrays."""

    def _initialize(self, value: np.ndarray) -> None:
        self.array = arrays.placed(value, self._engine.variable_device)

    def __cupy_get_ndarray__(self) -> Any:
        """Return the array for CuPy's functions. With CUDA's interface they wait for the stream; no bfloat16."""
        return self.array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def fitting(self, value: Any) -> Any:
        mine, value = self.array, component(value)
        if type(value) is type(mine) and value.dtype == mine.dtype and value.shape == mine.shape:
            return value
        if arrays.on_gpu(value):
            array = arrays.to_cupy(value)
            self._check_value(array)
            return array.astype(mine.dtype, copy=False)
        host = super().fitting(value).astype(mine.dtype, copy=False)
        return pinned.upload(host, arrays.device_of(mine).index)

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
        touched, places = np.unique(host.indices, return_inverse=True)
        if not len(touched):
            return
        where = pinned.upload(touched, arrays.device_of(self.array).index)
        here = LocalVariable.copy_of(self, arrays.to_host(self.array[where]), None, 0)
        here.write(method, IndexedSlices(host.values, places.reshape(-1)))
        self.array[where] = arrays.from_host(here.array, self.array)


def kind_on(device: Device) -> type[LocalVariable]:
    """Return the kind of the variables that live on a device."""
    return LocalVariable if device.kind == "cpu" else GpuVariable


_ARITHMETIC: dict[str, Callable[[Any, Any], object]] = {
    "assign": lambda mine, value: operator.setitem(mine, ..., value),
    "assign_add": operator.iadd,
    "assign_sub": operator.isub,
}
