"""Rows that can be written to HDF5 files, and how they are stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np

from mpistrat import nest
from mpistrat.arrays.arrays import as_numpy, refuse_masked
from mpistrat.data.errors import DatasetMismatchError, FilterUnavailableError
from mpistrat.data.write.blocks import Block
from mpistrat.storage.hdf5 import place_at_once

_UNKNOWN_ROW_BYTES = 4096  # assumed for types of variable length


class NewColumn(NamedTuple):
    """An HDF5 dataset to be written: the type and shape of a row, and its attributes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    attributes: Mapping[str, Any] = {}

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row; 4096 is assumed for types of variable length."""
        return _UNKNOWN_ROW_BYTES if self.dtype.hasobject else max(1, self.dtype.itemsize * math.prod(self.shape))

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
    definition = getattr(rows, "definition", None)  # of a Dataset
    if definition is not None:
        if not definition.streamed and definition.ready().length is None:
            raise ValueError("an endless dataset cannot be written: use take(), or repeat() with a count")
        stream = definition.streamed or definition.batch_size is not None
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
    if hasattr(rows, "definition"):
        plan = rows.definition.ready().plan
        return rows_of_plan(plan, range(plan.length), next(rows.epochs))
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


def rows_of_plan(
    plan: Any, which: range, iteration: int, names: Callable[[Any], dict[str, Any]] | None = None
) -> WritableRows:
    """Return some consecutive rows of an iteration of a plan. ``names`` is by default `named`."""
    all_named = names or named
    columns = {}
    for name, row_spec in all_named(plan.element_spec()).items():
        if None in row_spec.shape:
            raise DatasetMismatchError(
                f"dataset {name!r} has rows of different shapes ({row_spec}); fix: give all rows of a dataset one shape"
            )
        columns[name] = _column(name, row_spec.dtype, row_spec.shape, {})

    def read(first: int, stop: int) -> dict[str, np.ndarray]:
        return all_named(plan.read_rows(plan.locate(np.array(which[first:stop]), iteration)))

    return WritableRows(len(which), columns, read)


def named(tree: Any) -> dict[str, Any]:
    """Return the arrays by the names of their HDF5 datasets, ``x`` for one alone. Raise TypeError if one has none."""
    if not nest.is_nested(tree) or isinstance(tree, list):
        return {"x": _array("x", tree)}
    if not isinstance(tree, Mapping) or not tree:
        raise TypeError(f"rows must be named: give a dict of arrays, not {type(tree).__name__} {tree!r:.60}")
    arrays: dict[str, Any] = {}
    for name, value in tree.items():
        if not isinstance(name, str):
            raise TypeError(f"HDF5 datasets are named by strings, not {name!r}")
        if isinstance(value, Mapping):
            arrays.update({f"{name}/{inner}": array for inner, array in named(value).items()})
        elif nest.is_nested(value) and not isinstance(value, list):
            raise TypeError(f"rows must be named: {name!r} is a {type(value).__name__}, not an array")
        else:
            arrays[name] = _array(name, value)
    return arrays


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
        dtype = h5py.string_dtype()  # h5py has no type for NumPy's strings, which are UTF-32
    if dtype.kind == "V" and dtype.type is not np.void:  # h5py writes bytes without a meaning
        raise TypeError(f"dataset {name!r}: HDF5 has no type for {dtype}; fix: write astype('f4')")
    try:
        h5py.h5t.py_create(dtype, logical=True)
    except TypeError:
        raise TypeError(
            f"dataset {name!r}: HDF5 has no type for {dtype}; fix: give numbers or strings, for times astype('i8')"
        ) from None
    return NewColumn(dtype, tuple(shape), attributes)


_BLOCK_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 20
COMPRESSIONS = ("gzip", "zstd")


# --- storage: chunks, filters, and where rows without chunks lie ---------------------------


class Storage:
    """Options of how datasets are stored: chunks and filters."""

    def __init__(self, chunk: int | None, compress: str | None):
        self.chunk, self.compress = chunk, compress
        self.chunked = chunk is not None or compress is not None
        self.filters: dict[str, Any] = {}
        if compress is not None:
            self.filters = {"shuffle": True, **_filter(compress)}

    def chunk_rows(self, column: NewColumn) -> int:
        """Return the number of rows of a chunk."""
        return self.chunk or max(1, _CHUNK_BYTES // column.row_bytes)

    def block_rows(self, columns: Mapping[str, NewColumn]) -> int:
        """Return how many rows to hold in memory at a time: whole chunks, where there are chunks."""
        rows = max(1, _BLOCK_BYTES // sum(column.row_bytes for column in columns.values()))
        if not self.chunked:
            return rows
        longest = max(self.chunk_rows(column) for column in columns.values())
        return max(longest, rows // longest * longest)

    def blocks(
        self, rows: WritableRows, columns: Mapping[str, NewColumn], first: int, stop: int
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yield rows that fit the columns a few MiB at a time: the number of the first row, and the arrays."""
        block = self.block_rows(columns)
        for start in range(first, stop, block):
            part = rows.read(start, min(start + block, stop))
            for name, values in part.items():
                columns[name].check(name, values, start)
            yield start, part

    def in_place(self, columns: Mapping[str, NewColumn]) -> bool:
        """Return whether all rows have a place in the file as soon as the datasets are made."""
        return not self.chunked and not any(column.dtype.hasobject for column in columns.values())

    def create_all(
        self, columns: Mapping[str, NewColumn], rows: int | None, file: h5py.File
    ) -> dict[str, h5py.Dataset]:
        """Create datasets of that many rows; None for some that can grow."""
        return {name: self._create(file, name, column, rows) for name, column in columns.items()}

    def _create(self, file: h5py.File, name: str, column: NewColumn, rows: int | None) -> h5py.Dataset:
        options = dict(self.filters)
        if self.chunked or rows is None:
            longest = self.chunk_rows(column)
            # HDF5 refuses chunks of no rows, and longer ones than a dataset that does not grow.
            options["chunks"] = (longest if rows is None else max(1, min(longest, rows)), *column.shape)
        elif not column.dtype.hasobject:
            options["dcpl"] = place_at_once()
        if rows is None:
            options["maxshape"] = (None, *column.shape)
        dataset = file.create_dataset(name, (rows or 0, *column.shape), column.dtype, **options)
        dataset.attrs.update(column.attributes)
        return dataset


def put(datasets: Mapping[str, h5py.Dataset], rows: Mapping[str, Any], first: int, file: h5py.File) -> None:
    """Write rows to the datasets of a file, from row ``first`` on. Datasets that can grow do."""
    for name, part in rows.items():
        if datasets[name].maxshape[0] is None:
            datasets[name].resize(first + len(part), axis=0)
        datasets[name][first : first + len(part)] = part


def _filter(compress: str) -> dict[str, Any]:
    if compress == "gzip":
        return {"compression": "gzip", "compression_opts": 4}
    try:
        import hdf5plugin
    except ImportError:
        raise FilterUnavailableError(
            "compress='zstd' needs the HDF5 filter 32015 (zstd), which is not installed; fix: pip install hdf5plugin"
        ) from None
    return dict(hdf5plugin.Zstd(clevel=3))
