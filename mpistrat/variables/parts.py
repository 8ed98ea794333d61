"""Parts of variables: writes to elements and slices by the names of ``tf.Variable``, texts, and references."""

from __future__ import annotations

import dis
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

import numpy as np

from mpistrat import representation
from mpistrat.arrays import arrays

_MOST_PLACES = 4096
_known: dict[tuple[int, int], tuple[CodeType, bool]] = {}  # holds the code, or another one could get its id
_Variable = TypeVar("_Variable")


class ScatterNd:
    """The methods that write at indices whose last axis numbers the variable's axes.

    The replicas' writes are combined as by `assign_add` (for add and sub), or as by `assign` (for the others).
    """

    __slots__ = ()

    def scatter_nd_add(self: Any, indices: Any, updates: Any, name: str | None = None) -> Any:
        """Add to the elements or slices at ``indices``. Equal indices all add.

        Parameters
        ----------
        indices : array of int, shape (..., k)
            Each row numbers the first k axes of the variable.
        updates : array
            Of the shape of ``indices`` without its last axis, and the variable's other axes.
        name
            Ignored.

        Raises
        ------
        ValueError
            If an index is negative or too large, or the shapes do not fit.
        TypeError
            If the indices are not integers, or the dtype cannot be cast.

        Examples
        --------
        >>> import mpistrat
        >>> mpistrat.Variable([1.0, 2.0, 3.0]).scatter_nd_add([[2], [2]], [10.0, 20.0]).numpy()
        array([ 1.,  2., 33.])
        """
        return self.assign_add(self._delta(indices, updates))

    def scatter_nd_sub(self: Any, indices: Any, updates: Any, name: str | None = None) -> Any:
        """Subtract from the elements or slices at ``indices``; see `scatter_nd_add`."""
        return self.assign_sub(self._delta(indices, updates))

    def scatter_nd_min(self: Any, indices: Any, updates: Any, name: str | None = None) -> Any:
        """Set the elements or slices at ``indices`` to the minimum of old and new values; see `scatter_nd_add`."""
        return self._with(np.minimum, indices, updates)

    def scatter_nd_max(self: Any, indices: Any, updates: Any, name: str | None = None) -> Any:
        """Set the elements or slices at ``indices`` to the maximum of old and new values; see `scatter_nd_add`."""
        return self._with(np.maximum, indices, updates)

    def scatter_nd_update(self: Any, indices: Any, updates: Any, name: str | None = None) -> Any:
        """Set the elements or slices at ``indices``. Of equal indices the last one is kept; see `scatter_nd_add`."""
        return self._with(None, indices, updates)

    def batch_scatter_update(self: Any, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Set rows of each batch: ``v[i, ..., indices[i, ..., j]] = values[i, ..., j]``.

        Parameters
        ----------
        sparse_delta : object with ``values`` and ``indices``
            The indices have an axis for each batch axis of the variable, and a last one for rows of a batch. Those of
            `IndexedSlices` have one axis only.
        use_locking, name
            Ignored.

        Raises
        ------
        ValueError, TypeError
            As `scatter_nd_add`.

        Examples
        --------
        >>> from types import SimpleNamespace
        >>> import mpistrat
        >>> v = mpistrat.Variable([[1, 2], [3, 4]])
        >>> v.batch_scatter_update(SimpleNamespace(values=[[9], [8]], indices=[[1], [0]])).numpy()
        array([[1, 9],
               [8, 4]])
        """
        if not (hasattr(sparse_delta, "indices") and hasattr(sparse_delta, "values")):
            raise TypeError(f"batch_scatter_update needs values and indices, not a {type(sparse_delta).__name__}")
        indices = arrays.as_numpy(sparse_delta.indices)
        batches = np.meshgrid(*map(np.arange, indices.shape), indexing="ij")[:-1] if indices.ndim else []
        return self.scatter_nd_update(np.stack([*batches, indices], axis=-1), sparse_delta.values)

    def _delta(self: Any, indices: Any, updates: Any) -> np.ndarray:
        # A whole array, which can be combined between replicas that write at different indices.
        zeros = np.zeros(self.shape, self.dtype)
        by_axis, rows = self._placed(zeros, indices, updates)
        np.add.at(zeros, by_axis, rows)
        return zeros

    def _with(self: Any, ufunc: np.ufunc | None, indices: Any, updates: Any) -> Any:
        whole = self.numpy()
        by_axis, rows = self._placed(whole, indices, updates)
        if ufunc is None:
            whole[by_axis] = rows
        else:
            ufunc.at(whole, by_axis, rows)
        return self.assign(whole)

    def _placed(self: Any, array: np.ndarray, indices: Any, updates: Any) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Return checked indices, one array for each axis, and the updates on the host."""
        index, rows = arrays.as_numpy(indices), arrays.as_numpy(updates)
        axes = index.shape[-1] if index.ndim else 1
        index = self._checked_indices(index.reshape(*index.shape[:-1], axes), axes)
        wanted = (*index.shape[:-1], *array.shape[axes:])
        if rows.shape != wanted:
            raise ValueError(
                f"variable {self.name!r}: indices of {index.shape} need updates of shape {wanted}, not {rows.shape}"
            )
        if not np.can_cast(rows.dtype, array.dtype, "same_kind"):
            raise TypeError(f"variable {self.name!r} has dtype {array.dtype}: updates are {rows.dtype}; cast them")
        return tuple(np.moveaxis(index, -1, 0)), rows


def assign_follows(frame: FrameType) -> bool:
    """Return whether the code of ``frame`` takes the attribute ``assign`` of what the call in progress returns.

    A slice with that attribute would be a subclass of ``numpy.ndarray``: sums of 10 numbers take 1.8 times as long, and
    no fast path takes it.
    """
    code = frame.f_code
    key = id(code), frame.f_lasti
    known = _known.get(key)
    if known is None:
        if len(_known) >= _MOST_PLACES:  # of a program that makes code without end
            _known.clear()
        after = (instruction for instruction in dis.get_instructions(code) if instruction.offset > key[1])
        step = next((instruction for instruction in after if instruction.opname not in ("CACHE", "EXTENDED_ARG")), None)
        takes = step is not None and step.opname in ("LOAD_METHOD", "LOAD_ATTR") and step.argval == "assign"
        known = _known[key] = code, takes
    return known[1]


class Slice:
    """A part of a variable that is about to be written."""

    __slots__ = ("_key", "_variable")

    def __init__(self, variable: Any, key: Any):
        self._variable, self._key = variable, key

    def assign(self, value: Any, name: str | None = None) -> Any:
        """Write ``value`` as ``variable[key] = value`` does, and return the variable."""
        self._variable[self._key] = value
        return self._variable


def _own_values(variable: Any) -> str:
    values = arrays.to_host(variable.own_copy())
    return np.array2string(values, threshold=8, edgeitems=2, separator=" ").replace("\n", "")


def as_text(variable: Any) -> str:
    """Return a line with this replica's values. Never communicates."""
    kind = f"{type(variable).__name__} {variable.name!r}"
    return f"<{kind} shape={variable.shape} dtype={variable.dtype}, this replica: {_own_values(variable)}>"


def as_table(variable: Any) -> str:
    """Return an HTML table with this replica's values. Never communicates."""
    facts = {
        "name": variable.name,
        "shape": variable.shape,
        "dtype": str(variable.dtype),
        "synchronization": variable.synchronization.name,
        "aggregation": variable.aggregation.name,
        "trainable": variable.trainable,
        "device": variable.device,
        "this replica": _own_values(variable),
    }
    return representation.table(type(variable).__name__, facts)


class Reference(Generic[_Variable]):
    """A hashable reference to a variable, for dicts and sets: ``==`` of variables compares elements.

    `Variable.ref` returns it. It keeps the variable alive.
    """

    __slots__ = ("_variable",)

    def __init__(self, variable: _Variable):
        self._variable = variable

    def deref(self) -> _Variable:
        """Return the variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and self._variable is other._variable

    def __hash__(self) -> int:
        return id(self._variable)

    def __repr__(self) -> str:
        return f"<Reference to {self._variable!r}>"
