"""The rows of files in memory, which the ranks of a node read once and share."""

from __future__ import annotations

import bisect
import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpistrat.data.hdf5.manifest import Manifest
from mpistrat.data.hdf5.records import columns_in, ends_of_columns
from mpistrat.memory.buffer_pool import Buffers
from mpistrat.memory.made_once import FilledOnce
from mpistrat.memory.node import NoSharedMemoryError
from mpistrat.runtime.agreement.operation import operation

if TYPE_CHECKING:
    from mpistrat.data.hdf5.reader import FileReader

_PIECE_BYTES = 4 << 20  # that a rank reads into the memory of its node at once
_SHARE = operation("experimental_distribute_dataset")
_T = TypeVar("_T")
_log = logging.getLogger("mpistrat.data")


def made_by_node(ranks: Any, make: Callable[[Any], _T], otherwise: str) -> _T | None:
    """Return what the ranks of a node make together; or None if they cannot or a rank is alone there.

    ``otherwise`` tells the log what happens without it.
    """
    node = getattr(ranks, "node", None)
    if node is not None:
        with ranks.lock.collective(_SHARE):  # collective over all ranks, also a rank that is alone on its node
            if node.size > 1:
                try:
                    return make(node)
                except NoSharedMemoryError as error:
                    if node.rank == 0:
                        _log.warning("%s; %s", error, otherwise)
    return None


class RowsInMemory:
    """The rows of a manifest, one array for each column. They are read when rows are first taken.

    The ranks of the communicator ``node`` share the rows, and read them together: then making the object is collective.
    Raise NoSharedMemoryError on every rank of the node if they cannot, OSError if memory for one process is lacking.
    """

    def __init__(self, manifest: Manifest, reader: FileReader, block_rows: int, node: Any = None):
        self._manifest, self._reader = manifest, reader
        self._missing = np.ones(len(manifest.files), bool)  # files that were not read yet
        self._filled = self._by_file = False
        self._offsets: np.ndarray | None = None
        columns, rows = manifest.columns, manifest.rows
        # Whole blocks, of about 4 MiB.
        step = block_rows * max(1, round(_PIECE_BYTES / (block_rows * manifest.row_bytes)))
        # File, first row, and one past the last row of each piece, counted in all files.
        self._pieces = [
            (number, first, min(first + step, int(stop)))
            for number, (start, stop) in enumerate(zip(manifest.offsets, manifest.offsets[1:], strict=False))
            for first in range(int(start), int(stop), step)
        ]
        self._shifts = np.zeros(1, np.int64)  # from the rows of some files to the rows of all
        ends = ends_of_columns(columns, rows)
        self._begins = ends[:-1]
        self._shared = FilledOnce(ends[-1], len(self._pieces), node)
        self._row_bytes = [column.row_bytes for column in columns]
        self._columns = columns_in(self._shared.memory, columns, ends, rows)

    def of_files(self, which: Sequence[int]) -> RowsInMemory:
        """Return the rows of some files, in the same memory. Only these files are read for them."""
        part = copy.copy(self)
        part._missing = np.zeros_like(self._missing)
        part._missing[[*which]] = True
        part._filled = False
        offsets = self._manifest.offsets
        part._offsets = np.cumsum([0, *(offsets[i + 1] - offsets[i] for i in which)])
        part._shifts = offsets[[*which]] - part._offsets[:-1]
        return part

    def by_file(self) -> RowsInMemory:
        """Return the rows in the same memory. A file is read when a row of it is first taken."""
        part = copy.copy(self)
        part._missing, part._by_file = self._missing.copy(), True
        return part

    def take(self, rows: np.ndarray, buffers: Buffers) -> list[np.ndarray]:
        """Return these rows of every column, in new arrays.

        Raise DataFileError if a file cannot be read or has changed, and OSError if the node has not enough memory.
        """
        if not self._filled:
            self._fill(self._files_of(rows) if self._by_file else np.flatnonzero(self._missing))
            self._filled = not self._missing.any()
        if self._offsets is not None:
            rows = rows + self._shifts[self._offsets.searchsorted(rows, side="right") - 1]
        out = []
        for values in self._columns:
            taken = buffers.empty((len(rows), *values.shape[1:]), values.dtype)
            out.append(values.take(rows, 0, taken, "clip"))  # "raise" would copy the result once more
        return out

    def _files_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the files of these rows that are missing."""
        files = self._manifest.offsets.searchsorted(rows, side="right") - 1
        return np.unique(files[self._missing[files]])

    def _fill(self, files: np.ndarray) -> None:
        """Read the rows of files, except for those that a rank of the node has read already."""
        numbers: list[int] = []
        for index in files.tolist():
            numbers += range(bisect.bisect_left(self._pieces, (index,)), bisect.bisect_left(self._pieces, (index + 1,)))
        # Each rank of the node begins elsewhere, so that they read different pieces.
        start = int(self._shared.begin * len(numbers))
        for number in numbers[start:] + numbers[:start]:
            file, first, stop = self._pieces[number]
            spans = [
                (begin + first * size, (stop - first) * size)
                for begin, size in zip(self._begins, self._row_bytes, strict=True)
            ]
            self._shared.fill(number, spans, partial(self._load, file, first, stop))
        self._missing[files] = False

    def _load(self, file: int, first: int, stop: int) -> None:
        path, record, begin = self._manifest.file(file)
        self._reader.read_run(path, record, first - begin, [values[first:stop] for values in self._columns])
