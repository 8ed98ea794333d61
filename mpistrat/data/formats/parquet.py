"""Parquet files, read by pyarrow: a block is a row group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import h5py
import numpy as np

from mpistrat.data.errors import DataFileError, DatasetMismatchError, DatasetNotFoundError
from mpistrat.data.formats.block_reader import BlockFormat, column_in_blocks
from mpistrat.data.formats.contract import needed
from mpistrat.data.hdf5.records import Column, FileRecord, InBlocks
from mpistrat.data.hdf5.signatures import not_of_format


class Parquet(BlockFormat):
    """Parquet files: numbers, strings, and lists of numbers. Lists of variable length become arrays of objects."""

    name: ClassVar[str] = "Parquet"
    named: ClassVar[str] = "columns"

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of some columns of a file, from its footer."""
        with _opened(path) as file:
            found = os.stat(path)
            groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
            layout = InBlocks(np.cumsum([0, *groups]).astype(np.int64), np.empty(0, np.int64))
            schema = file.schema_arrow
            columns = []
            for name in names:
                if name not in schema.names:
                    raise DatasetNotFoundError(
                        f"file {path!r} has no column {name!r}; it has {', '.join(map(repr, schema.names))}; fix: name "
                        "one of these"
                    )
                if schema.names.count(name) > 1:
                    raise DataFileError.of_file(
                        path, f"it has {schema.names.count(name)} columns named {name!r}; fix: rename them"
                    )
                dtype, shape = _row_of(schema.field(name).type, f"file {path!r}, column {name!r}")
                columns.append(column_in_blocks(name, dtype, shape, layout, layout.most_rows))
        return FileRecord(found.st_size, found.st_mtime_ns, int(layout.starts[-1]), tuple(columns))

    def block(self, path: str, record: FileRecord, number: int) -> list[np.ndarray]:
        with _opened(path) as file:
            names = [column.name for column in record.columns]
            table = file.read_row_group(number, columns=names, use_threads=False)
        return [_values(table.column(column.name), path, column) for column in record.columns]


def _opened(path: str) -> Any:
    parquet = needed("pyarrow.parquet", "Parquet files")
    try:
        # Without this, pyarrow gives the numbers of damaged pages though they have a checksum. Takes 0.18 ms a MB.
        return parquet.ParquetFile(path, page_checksum_verification=True)
    except Exception as error:  # pyarrow's own errors are not in all versions OSErrors
        if isinstance(error, OSError) and error.errno is not None:
            raise DataFileError.unreadable(path, error) from None
        what = f"it is not a Parquet file ({error}); fix: copy or write it again"
        raise not_of_format(path, "from_parquet", what) from None


def _row_of(kind: Any, where: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Return dtype and shape of a row of a column."""
    types = needed("pyarrow", "Parquet files").types
    shape: tuple[int, ...] = ()
    while types.is_fixed_size_list(kind):
        shape, kind = (*shape, kind.list_size), kind.value_type
    if any(is_one(kind) for is_one in (types.is_struct, types.is_dictionary, types.is_time, types.is_interval)):
        raise DatasetMismatchError(f"{where}: rows of the type {kind} are not supported")
    return _dtype_of(kind), shape


def _dtype_of(kind: Any) -> np.dtype:
    """Return the dtype of values. Objects say what they are, as in h5py, since files are compared by it."""
    pyarrow = needed("pyarrow", "Parquet files")
    types = pyarrow.types
    if types.is_string(kind) or types.is_large_string(kind):
        return h5py.string_dtype()
    if types.is_list(kind) or types.is_large_list(kind):
        return h5py.vlen_dtype(_dtype_of(kind.value_type))
    # In UTC if it has a time zone. pyarrow's ``to_pandas_dtype`` needs pandas before version 26.
    return pyarrow.array([], kind).to_numpy(zero_copy_only=False).dtype


def _values(column: Any, path: str, described: Column) -> np.ndarray:
    values = column.combine_chunks()
    _refuse_missing(values, f"file {path!r}, column {described.name!r}")
    for _ in described.shape:
        values = values.flatten()
    found = values.to_numpy(zero_copy_only=False)
    return np.asarray(found, described.dtype).reshape(len(column), *described.shape)


def _refuse_missing(values: Any, where: str) -> None:
    """Raise if a value, or one inside a list, a structure or a map, is null."""
    if values.null_count:
        raise DataFileError(
            f"{where}: {values.null_count} values are missing (null), which arrays cannot hold; fix: fill them in, or "
            "leave these rows out"
        )
    types = needed("pyarrow", "Parquet files").types
    inside: Sequence[Any] = ()
    if types.is_struct(values.type):
        inside = values.flatten()
    elif types.is_map(values.type):
        inside = values.keys, values.items
    elif types.is_nested(values.type):
        inside = (values.flatten(),)
    for part in inside:
        _refuse_missing(part, where)
