"""Variables that are cut over the ranks of a replica, as a `ShardedArray` is."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.arrays import arrays
from mpistrat.mesh import REPLICA, ShardedArray
from mpistrat.values import IndexedSlices, VariableSynchronization
from mpistrat.variables.mirrored import MirroredVariable
from mpistrat.variables.variable import Variable


class CutVariable(MirroredVariable):
    """A variable whose value is a `ShardedArray`: each rank of a replica has a part, which is equal on all replicas.

    It reads as a `ShardedArray`, and operators work on it: what they say of communication holds here. Values to write,
    and gradients, are a `ShardedArray` that is cut alike, or the part of this rank as a plain array.

    Attributes
    ----------
    mesh : Mesh
    layout : Layout
        The shape of the whole, and its cuts.
    """

    def __init__(self, initial_value: ShardedArray, *args: Any, **kwargs: Any):
        self.mesh, self.layout = initial_value.mesh, initial_value.layout
        if self.mesh is not context.current().strategy.extended.engine.mesh or REPLICA in self.layout.axes:
            raise ValueError(
                f"a variable of {initial_value!r} needs MultiWorkerMirroredStrategy(mesh=mesh) with the mesh of the "
                f"array, which is cut along other axes than {REPLICA!r}: use such a strategy, or local or gather() of "
                "the array"
            )
        super().__init__(initial_value.local, *args, **kwargs)
        if self._synchronization is VariableSynchronization.ON_READ:
            raise ValueError(f"variable {self._name!r} has equal parts on all replicas: leave out ON_READ")

    def _rules(self) -> tuple[Hashable, ...]:
        return *super()._rules(), *self.layout

    def _read(self) -> Any:
        return self.of_part(arrays.to_host(self.own_copy()))

    def _shape_and_dtype(self) -> tuple[tuple[int, ...], np.dtype]:
        return self.layout.shape, self.own_copy().dtype

    @property
    def local(self) -> np.ndarray:
        """The part of this rank: a read-only view; a copy on a GPU. Never communicates."""
        return self._component[...]

    @property
    def part(self) -> Variable:
        return self._component

    def of_part(self, value: np.ndarray) -> ShardedArray:
        """Return a part of each rank as an array that is cut as this variable. Never communicates."""
        return ShardedArray(value, self.mesh, self.layout)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("mesh", "layout", "values"):  # before __init__
            return super().__getattr__(name)
        return getattr(self._read(), name)  # not of the part, which would pass for the whole

    def check_rows(self, rows: IndexedSlices) -> None:
        """Raise ValueError: the rows of a part are numbered differently from the rows of the whole."""
        raise ValueError(f"variable {self.name!r} is cut over ranks: give a ShardedArray or a part, not IndexedSlices")

    def write(self, method: str, value: Any) -> None:
        if isinstance(value, IndexedSlices):
            self.check_rows(value)
        value = value._read() if isinstance(value, CutVariable) else value
        if isinstance(value, ShardedArray):
            if value.mesh is not self.mesh or value.layout != self.layout:
                raise ValueError(f"variable {self.name!r}: {value!r} is cut in another way: redistribute it")
            value = value.local
        super().write(method, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._read()[key] = value

    @property
    def __array_struct__(self) -> Any:
        raise AttributeError("__array_struct__")  # NumPy asks for __array__ then, whose error names gather()

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return function(*map(_read, args), **{name: _read(value) for name, value in kwargs.items()})

    @property
    def __cupy_get_ndarray__(self) -> Any:
        raise AttributeError("__cupy_get_ndarray__")


def _read(argument: Any) -> Any:
    """Return an argument of NumPy with the arrays of cut variables, also in lists and tuples."""
    if isinstance(argument, (list, tuple)):
        return [*map(_read, argument)] if isinstance(argument, list) else (*map(_read, argument),)
    return argument._read() if isinstance(argument, CutVariable) else argument
