"""Batches of rows whose shapes differ: each row is padded to the longest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpistrat import nest
from mpistrat.data.pipeline.transforms import Batch
from mpistrat.data.rows import elements
from mpistrat.data.rows.spec import ArraySpec


@dataclass(frozen=True)
class PaddedBatch(Batch):
    """The transform that stacks elements, each padded to the longest. Arguments are those of `Chain.padded_batch`."""

    stacks_arrays: ClassVar[bool] = False

    shapes: Any = None
    values: Any = None

    def stack(self, rows: Sequence[Any], dtypes: Sequence[np.dtype] | None = None) -> Any:
        """Return padded rows as one batch, with these dtypes of its columns.

        Raise ValueError if a row does not fit the shape that was given, and TypeError if a value does not fit the
        dtype.
        """
        leaves, rebuild = nest.flatten(rows[0])
        if not leaves:
            return elements.stack(rows)
        shapes = _for_leaves(self.shapes, rows[0], len(leaves), "padded_shapes")
        values = _for_leaves(self.values, rows[0], len(leaves), "padding_values")
        columns = zip(*(nest.flatten(row)[0] for row in rows), strict=True)
        typed = itertools.starmap(elements.of_one_dtype, itertools.zip_longest(columns, dtypes or ()))
        return rebuild([_padded(*column) for column in zip(typed, shapes, values, range(len(leaves)), strict=True)])

    def spec(self, row: Any, size: int | None) -> Any:
        """Return the specs of a batch, from those of a row: None for dimensions of the longest row."""
        leaves, rebuild = nest.flatten(row)
        shapes = _for_leaves(self.shapes, row, len(leaves), "padded_shapes")
        found = []
        for leaf, shape in zip(leaves, shapes, strict=True):
            sizes = (None,) * len(leaf.shape) if shape is None else _sizes(shape)
            found.append(ArraySpec((size, *sizes), leaf.dtype))
        return rebuild(found)

    def __str__(self) -> str:
        return f"padded_{super().__str__()}"

    def without_numbers(self) -> str:
        return "padded_batch"


def _for_leaves(given: Any, row: Any, count: int, what: str) -> list[Any]:
    """Return what the program gave for each array of a row: one for all, or a structure like the row's."""
    if given is None or (what == "padding_values" and not nest.is_nested(given)):
        return [given] * count
    if not nest.is_nested(row):
        return [given]
    found: list[Any] = []

    def walk(part: Any, like: Any, path: str) -> None:
        if not nest.is_nested(like):
            found.append(part)
        elif isinstance(like, dict) and isinstance(part, dict) and sorted(like) == sorted(part):
            for key in sorted(like):
                walk(part[key], like[key], f"{path}[{key!r}]")
        elif isinstance(like, tuple) and isinstance(part, tuple) and len(like) == len(part):
            for number, (each, inner) in enumerate(zip(part, like, strict=True)):
                walk(each, inner, f"{path}[{number}]")
        else:
            raise ValueError(f"{what} must have the structure of an element, but {path or 'it'} is {part!r}")

    walk(given, row, "")
    return found


def _sizes(shape: Any) -> tuple[int | None, ...]:
    return tuple(None if size is None or size == -1 else int(size) for size in shape)


def _padded(column: Sequence[Any], shape: Any, value: Any, number: int) -> np.ndarray:
    arrays = [np.asarray(each) for each in column]
    dims = arrays[0].ndim
    sizes = (None,) * dims if shape is None else _sizes(shape)
    if len(sizes) != dims or any(each.ndim != dims for each in arrays):
        shapes = sorted({each.shape for each in arrays})
        raise ValueError(
            f"array {number} of the elements has the shapes {shapes}, which padded_batch() cannot pad to {sizes}: "
            "all need the same number of dimensions"
        )
    longest = [max(each.shape[axis] for each in arrays) for axis in range(dims)]
    for axis, size in enumerate(sizes):
        if size is not None and longest[axis] > size:
            raise ValueError(
                f"array {number} of an element is {longest[axis]} long on axis {axis}, but padded_shapes allows "
                f"{size}: give a larger shape, or None for the longest of each batch"
            )
    full = [longest[axis] if size is None else size for axis, size in enumerate(sizes)]
    dtype = np.result_type(*{each.dtype for each in arrays})
    padding = _padding(value, dtype, number)
    if dtype.kind in "US":
        dtype = np.result_type(dtype, np.asarray(padding).dtype)
    made = np.full((len(arrays), *full), padding, dtype)
    for number, each in enumerate(arrays):
        place: Any = (number, *(slice(0, size) for size in each.shape))
        made[place] = each
    return made


def _padding(value: Any, dtype: np.dtype, number: int) -> Any:
    if value is None:
        return np.zeros((), dtype)[()] if dtype.kind != "O" else None
    found = np.asarray(value)
    if found.dtype.kind in "iu" and dtype.kind in "iu":
        fits = np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    else:
        fits = np.can_cast(found.dtype, dtype, "same_kind") or found.dtype.kind == dtype.kind
    if not fits:
        raise TypeError(f"the padding value {value!r} does not fit array {number} of the elements, of dtype {dtype}")
    return value
