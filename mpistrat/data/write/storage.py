"""Storage of rows in a new HDF5 file: chunks, filters, and where rows without chunks lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import h5py
import numpy as np

from mpistrat.data.errors import FilterUnavailableError
from mpistrat.data.write.writable import NewColumn, WritableRows

_BLOCK_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 20
COMPRESSIONS = ("gzip", "zstd")


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
            options["chunks"] = (longest if rows is None else max(1, min(longest, rows)), *column.shape)
        elif not column.dtype.hasobject:
            options["dcpl"] = _place_at_once()
        if rows is None:
            options["maxshape"] = (None, *column.shape)
        made = file.create_dataset(name, (rows or 0, *column.shape), column.dtype, **options)
        made.attrs.update(column.attributes)
        return made


def put(datasets: Mapping[str, h5py.Dataset], rows: Mapping[str, Any], first: int, file: h5py.File) -> None:
    """Write rows to the datasets of a file, from row ``first`` on. Datasets that can grow do."""
    for name, part in rows.items():
        if datasets[name].maxshape[0] is None:
            datasets[name].resize(first + len(part), axis=0)
        datasets[name][first : first + len(part)] = part


def _place_at_once() -> Any:
    """Return the properties of a dataset whose place in the file is known when it is made. No value is filled in."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return properties


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
