"""Parquet files, read by pyarrow: a block is a row group."""

from __future__ import annotations

import operator
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar

import h5py
import numpy as np

from mpistrat.data.errors import DataFileError, DatasetMismatchError, DatasetNotFoundError, not_of_format
from mpistrat.data.formats.block_reader import BlockFormat, blocks_of, column_in_blocks
from mpistrat.data.formats.contract import needed
from mpistrat.data.hdf5.records import Column, FileRecord, InBlocks


class Parquet(BlockFormat):
    """Parquet files: numbers, strings, and lists of numbers. Lists of variable length become arrays of objects.

    ``null`` has what stands for missing values of some columns. ``filters`` are conditions on rows, as pyarrow takes
    them.
    """

    name: ClassVar[str] = "Parquet"
    named: ClassVar[str] = "columns"

    def __init__(self, null: Mapping[str, Any] | None = None, filters: Any = None):
        self._null, self._filters, self.filtered = dict(null or {}), filters, filters is not None
        if filters is not None:
            needed("pyarrow.parquet", "Parquet files").filters_to_expression(filters)

    def columns(self, path: str) -> list[str]:
        """Return the names of all columns of a file: fields of structures by their path, and columns of its folders."""
        return [name for field in self._opened(path)[1] for name in _leaves(field)]

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of some columns of a file, from its footer. Rows are counted if there are filters."""
        status = os.stat(path)
        fragment, schema = self._opened(path)
        counts = [(group.id, group.num_rows) for group in fragment.row_groups]
        rows = [count for _, count in counts]
        if any(count < 0 for count in rows) or sum(rows) != fragment.metadata.num_rows:  # pyarrow reads fewer then
            message = f"its row groups have {rows} rows, and the file {fragment.metadata.num_rows}"
            raise DataFileError.of_file(path, f"{message}; fix: copy or write it again")
        if self._filters is not None:
            # Without row groups of which all rows are excluded by their statistics.
            fragments = fragment.split_by_row_group(self._filter, schema)
            counts = [(group.row_groups[0].id, self._scanner(group, schema).count_rows()) for group in fragments]
            counts = [entry for entry in counts if entry[1]]
        starts = np.cumsum([0, *(rows for _, rows in counts)]).astype(np.int64)
        layout = InBlocks(starts, np.array([group for group, _ in counts], np.int64))
        for name in {*self._null} - {*names}:
            raise DatasetNotFoundError(f"null= names {name!r}, which is not one of the columns {[*names]}")
        columns = []
        for name in names:
            where = f"file {path!r}, column {name!r}"
            kind = self._type_of(path, schema, name)
            dtype, shape = _row_of(kind, where)
            dtype = self._with_null(dtype, name, where)
            columns.append(column_in_blocks(name, dtype, shape, layout, layout.most_rows, _meaning(kind)))
        return FileRecord(status.st_size, status.st_mtime_ns, int(starts[-1]), tuple(columns))

    @staticmethod
    def _type_of(path: str, schema: Any, name: str) -> Any:
        """Return the type of a column, or of a field of a structure."""
        top, *inner = _path_of(name, schema)
        if schema.names.count(top) > 1:
            raise DataFileError.of_file(
                path, f"it has {schema.names.count(top)} columns named {top!r}; fix: rename them"
            )
        try:
            kind = schema.field(top).type
            for part in inner:
                kind = kind.field(part).type
            return kind
        except (KeyError, AttributeError):
            known = ", ".join(repr(name) for field in schema for name in _leaves(field))
            raise DatasetNotFoundError(
                f"file {path!r} has no column {name!r}; it has {known}; fix: name one of these"
            ) from None

    def _with_null(self, dtype: np.dtype, name: str, where: str) -> np.dtype:
        """Return the dtype of a column in which a value stands for missing ones."""
        if name not in self._null or dtype.hasobject:
            return dtype
        value = np.asarray(self._null[name])
        if value.dtype.kind == "f" and dtype.kind in "iub":  # as pandas has them
            return np.dtype(float)
        try:
            fits = bool(value.astype(dtype) == value)
        except (TypeError, ValueError, OverflowError):
            fits = False
        if not fits and not (value.dtype.kind == "f" and np.isnan(value)):
            raise DataFileError(f"{where}: null={self._null[name]!r} is not of {dtype}; fix: give a value that fits")
        return dtype

    @property
    def _filter(self) -> Any:
        if self._filters is None:
            return None
        return needed("pyarrow.parquet", "Parquet files").filters_to_expression(self._filters)

    def _opened(self, path: str, group: int | None = None) -> tuple[Any, Any]:
        """Return a file or one of its row groups as pyarrow's fragment, and the schema with columns of its folders."""
        _, datasets, local = (needed(f"pyarrow.{name}", "Parquet files") for name in ("parquet", "dataset", "fs"))
        # Without this, pyarrow gives the numbers of damaged pages though they have a checksum. Takes 0.18 ms a MB.
        checked = datasets.ParquetFragmentScanOptions(page_checksum_verification=True)
        file_format = datasets.ParquetFileFormat(default_fragment_scan_options=checked)
        folders = _of_folders(path)
        known = reduce(
            operator.and_, (datasets.field(name) == value for name, value in folders.items()), datasets.scalar(True)
        )
        try:
            fragment = file_format.make_fragment(
                path, local.LocalFileSystem(), partition_expression=known, row_groups=None if group is None else [group]
            )
            schema = fragment.physical_schema
        except Exception as error:  # pyarrow's own errors are not in all versions OSErrors
            if isinstance(error, OSError) and error.errno is not None:
                raise DataFileError.unreadable(path, error) from None
            message = f"it is not a Parquet file ({error}); fix: copy or write it again"
            raise not_of_format(path, "from_parquet", message) from None
        for name, value in folders.items():
            if name not in schema.names:
                schema = schema.append(needed("pyarrow", "Parquet files").field(name, value.type))
        return fragment, schema

    def _scanner(self, fragment: Any, schema: Any, names: Sequence[str] = ()) -> Any:
        field = needed("pyarrow.dataset", "Parquet files").field
        columns = {name: field(*_path_of(name, schema)) for name in names}
        return fragment.scanner(schema, columns=columns or None, filter=self._filter, use_threads=False)

    def block(self, path: str, record: FileRecord, number: int) -> list[np.ndarray]:
        names, group = [column.name for column in record.columns], int(blocks_of(record).places[number])
        table = None
        if self._filters is None:  # a scanner takes 15 % longer
            parquet = needed("pyarrow.parquet", "Parquet files")
            with parquet.ParquetFile(path, page_checksum_verification=True) as file:
                table = file.read_row_group(group, columns=names, use_threads=False)
        if table is None or {*table.column_names} != {*names}:  # of folders, or of structures
            table = self._scanner(*self._opened(path, group), names).to_table()
        return [self._values(table.column(column.name), path, column) for column in record.columns]

    def _values(self, column: Any, path: str, described: Column) -> np.ndarray:
        pyarrow = needed("pyarrow", "Parquet files")
        values = column.combine_chunks()
        if pyarrow.types.is_dictionary(values.type):  # categories
            values = values.dictionary_decode()
        if described.name in self._null:
            if described.dtype.kind == "f":
                values = values.cast(pyarrow.from_numpy_dtype(described.dtype))
            values = values.fill_null(pyarrow.scalar(self._null[described.name], values.type))
        if not pyarrow.types.is_floating(values.type) and not pyarrow.types.is_timestamp(values.type):
            _refuse_missing(values, f"file {path!r}, column {described.name!r}")  # else NaN and NaT
        for _ in described.shape:
            values = values.flatten()
        array = values.to_numpy(zero_copy_only=False)
        return np.asarray(array, described.dtype).reshape(len(column), *described.shape)

    def __str__(self) -> str:
        filters = f", filters {self._filters}" if self._filters is not None else ""
        return self.name + (f", null {self._null}" if self._null else "") + filters


def _leaves(field: Any) -> list[str]:
    """Return the name of a column, or the paths of the fields of a structure."""
    if not needed("pyarrow", "Parquet files").types.is_struct(field.type):
        return [field.name]
    return [f"{field.name}.{name}" for inner in field.type for name in _leaves(inner)]


def _path_of(name: str, schema: Any) -> list[str]:
    """Return a column's name, or the path of a field in a structure."""
    return [name] if name in schema.names else name.split(".")


def _of_folders(path: str) -> dict[str, Any]:
    """Return the values that names of folders have, as ``year=2020``: integers or strings, as pyarrow takes them."""
    pyarrow = needed("pyarrow", "Parquet files")
    values = {}
    for part in os.path.dirname(path).split(os.sep):
        name, equals, text = part.partition("=")
        if name and equals:
            value = urllib.parse.unquote(text)
            whole = re.fullmatch("-?[0-9]{1,9}", value)
            null = value == "__HIVE_DEFAULT_PARTITION__"
            values[name] = pyarrow.scalar(
                None if null else int(value) if whole else value, "int32" if whole else "string"
            )
    return values


def _row_of(kind: Any, where: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Return dtype and shape of a row of a column."""
    pyarrow = needed("pyarrow", "Parquet files")
    types = pyarrow.types
    shape: tuple[int, ...] = ()
    kind = kind.value_type if types.is_dictionary(kind) else kind
    while types.is_fixed_size_list(kind):
        shape, kind = (*shape, kind.list_size), kind.value_type
    others = (types.is_struct, types.is_time, types.is_interval)
    if isinstance(kind, pyarrow.BaseExtensionType) or any(is_one(kind) for is_one in others):
        raise DatasetMismatchError(f"{where}: rows of the type {kind} are not supported; fix: cast it")
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


def _meaning(kind: Any) -> str:
    """Return what the dtype of values lacks: a time zone, or what objects are that are neither strings nor numbers."""
    types = needed("pyarrow", "Parquet files").types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    if types.is_timestamp(kind):
        return f"time zone {kind.tz}" if kind.tz else ""
    if types.is_decimal(kind):
        return "decimals"  # which have their scale with them
    if any(is_one(kind) for is_one in (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)):
        return "bytes"
    return "" if types.is_primitive(kind) and not types.is_date64(kind) else str(kind).removeprefix("large_")


def _refuse_missing(values: Any, where: str) -> None:
    """Raise if a value, or one inside a list, a structure or a map, is null."""
    if values.null_count:
        raise DataFileError(
            f"{where}: {values.null_count} values are missing (null), which arrays cannot hold; fix: say what "
            "stands for them, as null={'x': -1}, or leave these rows out by filters="
        )
    types = needed("pyarrow", "Parquet files").types
    # The count above is of whole values only.
    inside: Sequence[Any] = ()
    if types.is_struct(values.type):
        inside = values.flatten()
    elif types.is_map(values.type):
        inside = values.keys, values.items
    elif types.is_nested(values.type):
        inside = (values.flatten(),)
    for part in inside:
        _refuse_missing(part, where)
