"""Rows that can be written to HDF5 files: arrays by name, datasets, iterables of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np

from mpistrat import nest
from mpistrat.arrays.arrays import as_numpy, refuse_masked
from mpistrat.data.dataset import Dataset
from mpistrat.data.errors import DatasetMismatchError
from mpistrat.data.options import INFINITE_CARDINALITY
from mpistrat.data.write.boxes import Block

_UNKNOWN_ROW_BYTES = 4096  # assumed for types of variable length


class NewColumn(NamedTuple):
    """An HDF5 dataset to be written: the type and shape of a row, and its attributes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    attributes: Mapping[str, Any] = {}

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row; 4096 is assumed for types of variable length."""
        if self.dtype.hasobject:
            return _UNKNOWN_ROW_BYTES
        return max(1, self.dtype.itemsize * math.prod(self.shape))

    def check(self, name: str, values: Any, first: int) -> None:
        """Raise DatasetMismatchError if rows, of which ``first`` is the number of the first one, do not fit.

        HDF5 would truncate numbers, and repeat rows that are too small.
        """
        if h5py.check_string_dtype(self.dtype) is not None and values.dtype.hasobject:
            for row, value in enumerate(values.flat):
                if not isinstance(value, (str, bytes)):
                    raise DatasetMismatchError(
                        f"dataset {name!r}: row {first + row // max(1, math.prod(self.shape))} has an object that is "
                        f"not a string ({value!r:.60}); fix: give arrays of numbers, or rows padded to one shape"
                    )
        dtype, inner = self.dtype.subdtype or (self.dtype, ())
        fits = dtype.hasobject or values.dtype.hasobject or np.can_cast(values.dtype, dtype, "safe")
        if not fits or tuple(values.shape[1:]) != (*self.shape, *inner):
            raise DatasetMismatchError(
                f"dataset {name!r} has rows of {self.dtype} {self.shape}, but rows from row {first} on are of "
                f"{values.dtype} {tuple(values.shape[1:])}; fix: give all rows of a dataset one dtype and shape"
            )


class WritableRows(NamedTuple):
    """Rows that can be read in runs: ``read(first, stop)`` returns an array for each column."""

    number: int
    columns: dict[str, NewColumn]
    read: Callable[[int, int], dict[str, np.ndarray]]


def is_stream(rows: Any, files: int) -> bool:
    """Return whether rows are read in order, as a stream of batches. Raise ValueError if that has no end."""
    if isinstance(rows, Dataset):
        if rows.cardinality() == INFINITE_CARDINALITY:
            raise ValueError("an endless dataset cannot be written: use take(), or repeat() with a count")
        stream = rows.batch_size is not None or rows.cardinality() < 0
    else:
        # A tuple is a structure, as everywhere else: `named` refuses it. Taken for batches, it appended y to x.
        stream = not (nest.is_nested(rows) or isinstance(rows, list) or hasattr(rows, "shape"))
    if stream and files > 1:
        raise ValueError(
            f"{files} files can be written only if the number of rows is known: give arrays, or a Dataset "
            "of known length without batch()"
        )
    return stream


def random_access(rows: Any) -> WritableRows:
    """Return the rows of arrays of one length (or raise DatasetMismatchError), or of a dataset of known length."""
    if isinstance(rows, Dataset):
        return _of_dataset(rows)
    arrays = named(rows)
    columns = {name: column_of(name, array) for name, array in arrays.items()}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise DatasetMismatchError(f"the arrays must be equally long along axis 0, but their lengths are {lengths}")
    return WritableRows(
        next(iter(lengths.values())),
        columns,
        lambda first, stop: {name: as_numpy(array[first:stop]) for name, array in arrays.items()},
    )


def _of_dataset(dataset: Dataset) -> WritableRows:
    columns = {}
    for name, each in named(dataset.element_spec).items():
        if None in each.shape:
            raise DatasetMismatchError(
                f"dataset {name!r} has rows of different shapes ({each}); fix: give all rows of a dataset one shape"
            )
        columns[name] = _column(name, each.dtype, each.shape, {})
    epoch = next(dataset.epochs)

    def read(first: int, stop: int) -> dict[str, np.ndarray]:
        part = dataset.skip(first).batch(stop - first)
        return named(part.definition.ready().plan.element(0, epoch))

    return WritableRows(len(dataset), columns, read)


def named(tree: Any) -> dict[str, Any]:
    """Return the arrays by the names of their HDF5 datasets, ``x`` for one alone. Raise TypeError if one has none."""
    if not nest.is_nested(tree) or isinstance(tree, list):
        return {"x": _array("x", tree)}
    if not isinstance(tree, Mapping) or not tree:
        raise TypeError(f"rows must be named: give a dict of arrays, not {type(tree).__name__} {tree!r:.60}")
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if not isinstance(name, str):
            raise TypeError(f"HDF5 datasets are named by strings, not {name!r}")
        if isinstance(value, Mapping):
            found.update({f"{name}/{inner}": each for inner, each in named(value).items()})
        elif nest.is_nested(value) and not isinstance(value, list):
            raise TypeError(f"rows must be named: {name!r} is a {type(value).__name__}, not an array")
        else:
            found[name] = _array(name, value)
    return found


def _array(name: str, value: Any) -> Any:
    """Return a value with NumPy's dtype. Arrays that have one, of files for instance, are read in runs later."""
    refuse_masked(value)
    if isinstance(value, Block):
        raise TypeError(f"dataset {name!r}: a Block is a part of an array, not rows; fix: append it by a Writer")
    if hasattr(value, "columns"):
        raise TypeError(
            f"dataset {name!r}: a table has columns of several dtypes; fix: give "
            "{name: table[name].to_numpy() for name in table}"
        )
    if hasattr(value, "shape") and isinstance(getattr(value, "dtype", None), np.dtype):
        return value
    try:
        return as_numpy(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"dataset {name!r}: {type(value).__name__} cannot be converted to an array ({error}); fix: give an array, "
            "rows of different lengths padded to one"
        ) from error


def column_of(name: str, array: Any) -> NewColumn:
    """Return the HDF5 dataset that an array becomes. Raise TypeError without such a type, ValueError for a scalar."""
    if not array.shape:
        raise ValueError(
            f"{name!r} is a scalar, but axis 0 must be the axis of the samples; a Writer appends scalars and blocks"
        )
    attributes = dict(array.attrs) if isinstance(array, h5py.Dataset) else {}
    return _column(name, array.dtype, array.shape[1:], attributes)


def _column(name: str, dtype: Any, shape: Sequence[int], attributes: Mapping[str, Any]) -> NewColumn:
    dtype = np.dtype(dtype)
    if dtype.kind == "U" or (dtype.kind == "O" and dtype.metadata is None):
        dtype = h5py.string_dtype()
    if dtype.kind == "V" and dtype.type is not np.void:  # h5py writes bytes without a meaning
        raise TypeError(f"dataset {name!r}: HDF5 has no type for {dtype}; fix: write astype('f4')")
    try:
        h5py.h5t.py_create(dtype, logical=True)
    except TypeError:
        raise TypeError(
            f"dataset {name!r}: HDF5 has no type for {dtype}; fix: give numbers or strings, for times astype('i8')"
        ) from None
    return NewColumn(dtype, tuple(shape), attributes)
