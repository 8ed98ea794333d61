"""Rows of HDF5 files in memory: all of them, read once for a node."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrat.data.hdf5.manifest import Manifest
from mpistrat.data.hdf5.reader import FileReader
from mpistrat.memory.buffer_pool import Buffers
from mpistrat.memory.filled_once import FilledOnce

_PIECE_BYTES = 4 << 20
_LINE = 64  # bytes of a cache line


class RowsInMemory:
    """The rows of a manifest, one array for each column. They are read when rows are first taken.

    The ranks of the communicator ``node`` share the rows, and read them together: then making the object is collective.
    Raise NoSharedMemoryError on every rank of the node if they cannot, OSError if memory for one process is lacking.
    """

    def __init__(self, manifest: Manifest, reader: FileReader, block_rows: int, node: Any = None):
        self._manifest, self._reader = manifest, reader
        self._files: Sequence[int] = range(len(manifest.files))
        self._offsets: np.ndarray | None = None
        self._filled = False
        columns, rows = manifest.columns, manifest.rows
        step = block_rows * max(1, round(_PIECE_BYTES / (block_rows * manifest.row_bytes)))
        # File, first row, and one past the last row of each piece, counted in all files.
        self._pieces = [
            (number, first, min(first + step, int(stop)))
            for number, (start, stop) in enumerate(zip(manifest.offsets, manifest.offsets[1:], strict=False))
            for first in range(int(start), int(stop), step)
        ]
        self._shifts = np.zeros(1, np.int64)
        self._begins: list[int] = []
        end = 0
        for column in columns:
            self._begins.append(end)
            end += -(-rows * column.row_bytes // _LINE) * _LINE
        self._shared = FilledOnce(end, len(self._pieces), node)
        self._row_bytes = [column.row_bytes for column in columns]
        self._columns = [
            self._shared.memory[begin : begin + rows * column.row_bytes].view(column.dtype).reshape(rows, *column.shape)
            for begin, column in zip(self._begins, columns, strict=True)
        ]

    def of_files(self, which: Sequence[int]) -> RowsInMemory:
        """Return the rows of some files, in the same memory. Only these files are read for them."""
        part = copy.copy(self)
        part._files, part._filled = which, False
        offsets = self._manifest.offsets
        part._offsets = np.cumsum([0, *(offsets[i + 1] - offsets[i] for i in which)])
        part._shifts = offsets[[*which]] - part._offsets[:-1]
        return part

    def take(self, rows: np.ndarray, buffers: Buffers) -> list[np.ndarray]:
        """Return these rows of every column, in new arrays.

        Raise DataFileError if a file cannot be read or has changed, and OSError if the node has not enough memory.
        """
        if not self._filled:
            self._fill()
            self._filled = True
        if self._offsets is not None:
            rows = rows + self._shifts[self._offsets.searchsorted(rows, side="right") - 1]
        out = []
        for values in self._columns:
            taken = buffers.empty((len(rows), *values.shape[1:]), values.dtype)
            out.append(values.take(rows, 0, taken, "clip"))  # "raise" would copy the result once more
        return out

    def _fill(self) -> None:
        """Read the rows, except for those that a rank of the node has read already."""
        wanted = {*self._files}
        numbers = [i for i, (file, _, _) in enumerate(self._pieces) if file in wanted]
        start = int(self._shared.part * len(numbers))
        for number in numbers[start:] + numbers[:start]:
            file, first, stop = self._pieces[number]
            spans = [
                (begin + first * size, (stop - first) * size)
                for begin, size in zip(self._begins, self._row_bytes, strict=True)
            ]
            self._shared.fill(number, spans, partial(self._load, file, first, stop))

    def _load(self, file: int, first: int, stop: int) -> None:
        path, record, begin = self._manifest.file(file)
        out = [values[first:stop] for values in self._columns]
        self._reader.read_run(path, record, first - begin, out)
