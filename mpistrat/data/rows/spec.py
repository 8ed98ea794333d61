"""Specs of elements: shape and dtype of every array, and the byte order of this machine."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpistrat import nest


@dataclass(frozen=True, init=False, repr=False)
class ArraySpec:
    """Shape and dtype of an array.

    Parameters
    ----------
    shape : iterable of int or None
        The shape. None stands for a dimension that is not known beforehand.
    dtype : numpy.dtype or convertible to one
        The type of the elements.
    name : str, optional
        A name, part of equality.

    Examples
    --------
    >>> ArraySpec((None, 3), "float32")
    ArraySpec(shape=(None, 3), dtype=float32)
    >>> ArraySpec((2,), int) == ArraySpec([2], "int64")
    True
    """

    _mpistrat_leaf: ClassVar[bool] = True

    shape: tuple[int | None, ...]
    dtype: np.dtype
    name: str | None

    def __init__(self, shape: Iterable[int | None], dtype: Any, name: str | None = None):
        sizes = tuple(None if size is None else operator.index(size) for size in shape)
        if any(size is not None and size < 0 for size in sizes):
            raise ValueError(f"a shape must not have negative dimensions, got {sizes}: use None for an unknown one")
        object.__setattr__(self, "shape", sizes)  # the class is frozen
        object.__setattr__(self, "dtype", np.dtype(dtype))
        object.__setattr__(self, "name", name)

    def __repr__(self) -> str:
        name = "" if self.name is None else f", name={self.name!r}"
        return f"ArraySpec(shape={self.shape}, dtype={self.dtype}{name})"

    def is_compatible_with(self, value: Any) -> bool:
        """Return whether an array, or another spec, has this dtype and a compatible shape.

        Parameters
        ----------
        value : array or ArraySpec
            The array or spec to compare with.

        Examples
        --------
        >>> ArraySpec((None, 2), "float64").is_compatible_with(np.zeros((5, 2)))
        True
        """
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            value = np.asarray(value)
        return (
            self.dtype == value.dtype
            and len(self.shape) == len(value.shape)
            and all(a is None or b is None or a == b for a, b in zip(self.shape, value.shape, strict=True))
        )


def row_bytes(spec: Any) -> int:
    """Return the bytes of a row, from its specs. An unknown dimension counts as 1."""
    return sum(
        math.prod(1 if size is None else size for size in leaf.shape) * leaf.dtype.itemsize
        for leaf in nest.flatten(spec)[0]
    )


def of_array(value: Any) -> ArraySpec:
    """Return the spec of an array, a number or another leaf."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return ArraySpec(value.shape, value.dtype)
    value = np.asarray(value)
    return ArraySpec(value.shape, value.dtype)


def stacked(spec: Any, size: int | None) -> Any:
    """Return the specs of elements stacked on a new axis 0 of the given size."""
    return nest.map_structure(lambda s: ArraySpec((size, *s.shape), s.dtype, s.name), spec)


def any_size(spec: Any) -> Any:
    """Return the specs of batches of any size: axis 0 becomes None."""
    return nest.map_structure(lambda s: ArraySpec((None, *s.shape[1:]), s.dtype, s.name) if s.shape else s, spec)


def zeros(spec: Any, rows: int) -> Any:
    """Return arrays of zeros with that many rows, from the specs of one row."""
    return nest.map_structure(lambda s: np.zeros((rows, *(size or 0 for size in s.shape)), s.dtype), spec)


def no_rows_of(spec: Any) -> Any:
    """Return a batch without rows, from the specs of another batch."""
    return nest.map_structure(lambda s: np.zeros((0, *s.shape[1:]) if s.shape else (), s.dtype), spec)


def native(dtype: np.dtype) -> np.dtype:
    """Return the dtype in the byte order of this machine.

    ``dtype.isnative`` alone is not sufficient: it is true for every array type, also inside a compound type.
    """
    if dtype.isnative and dtype.fields is None and dtype.subdtype is None:
        return dtype
    other = dtype.newbyteorder("=")
    return dtype if other == dtype else other  # newbyteorder() drops the metadata of the dtype


def in_native_order(array: np.ndarray) -> np.ndarray:
    """Return the array, or a copy if its numbers have another byte order."""
    dtype = native(array.dtype)
    return array if dtype is array.dtype else array.astype(dtype)
