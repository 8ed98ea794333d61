"""Reader of rows that come in blocks: the library of the format reads a block, and the last blocks are kept."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from mpistrat.data.errors import DataFileError
from mpistrat.data.formats.contract import Format
from mpistrat.data.hdf5.chunks import by_number, run_of
from mpistrat.data.hdf5.raw import changed
from mpistrat.data.hdf5.reader import KeepingReader
from mpistrat.data.hdf5.records import Column, FileRecord, InBlocks, columns_in, ends_of_columns
from mpistrat.data.rows.spec import native
from mpistrat.memory.made_once import Chunk, in_turn


class BlockFormat(Format):
    """A format whose rows are read in blocks. All columns of a file have the same blocks."""

    in_blocks: ClassVar[bool] = True

    @abstractmethod
    def block(self, path: str, record: FileRecord, number: int) -> list[np.ndarray]:
        """Return block ``number`` of a file: an array for each column. Any error is raised as a `DataFileError`."""

    def state(self, path: str, names: Sequence[str], status: os.stat_result) -> int:
        """Return a number that changes when a file is written to."""
        return status.st_mtime_ns

    def reader(self, most_decoded: int) -> BlockReader:
        return BlockReader(self, most_decoded)


def column_in_blocks(
    name: str, stored: np.dtype, shape: tuple[int, ...], layout: InBlocks, block_rows: int, meaning: str = ""
) -> Column:
    """Return the description of a column that is read in blocks: the dtype in the file, and the shape of a row."""
    return Column(name, shape, native(stored), block_rows, 0, True, False, stored, layout, (), meaning=meaning)


def layout_of(column: Column) -> InBlocks:
    """Return where the blocks of a column begin and lie."""
    assert isinstance(column.layout, InBlocks)
    return column.layout


def blocks_of(record: FileRecord) -> InBlocks:
    """Return where the blocks of a file begin, and where the blocks of its first column lie."""
    return layout_of(record.columns[0])


class BlockReader(KeepingReader):
    """Reader of rows in blocks, of which it keeps ``most_decoded`` bytes, and always the last one."""

    fewest_kept = 1

    def __init__(self, file_format: BlockFormat, most_decoded: int):
        self._format = file_format
        super().__init__(most_decoded, file_format.describe)

    def read_run(self, path: str, record: FileRecord, first: int, out: Sequence[np.ndarray]) -> None:
        """Read the rows of a file from ``first`` on. ``out`` has one array for each column."""
        starts, last = blocks_of(record).starts, first + len(out[0])
        low, high = (starts.searchsorted([first, last - 1], side="right") - 1).tolist()
        begins = np.clip(starts[low : high + 2], first, last)
        spans = zip(begins[:-1].tolist(), begins[1:].tolist(), starts[low : high + 1].tolist(), strict=True)
        wanted = [
            (number, slice(begin - start, end - start), slice(begin - first, end - first))
            for number, (begin, end, start) in enumerate(spans, low)
        ]
        self._read(path, record, wanted, out)

    def read_rows(
        self, path: str, record: FileRecord, rows: np.ndarray, out: Sequence[np.ndarray], indices: np.ndarray
    ) -> None:
        """Read ascending rows, as `FileReader.read_rows`. Raise DataFileError if the file has changed."""
        starts = blocks_of(record).starts
        blocks = starts.searchsorted(rows, side="right") - 1
        wanted = [
            (number, run_of(rows[here] - starts[number]), run_of(indices[here])) for number, here in by_number(blocks)
        ]
        self._read(path, record, wanted, out)

    def _read(
        self, path: str, record: FileRecord, wanted: Sequence[tuple[int, Any, Any]], out: Sequence[np.ndarray]
    ) -> None:
        """Read rows of blocks. ``wanted`` has the number of each block, rows of it, and their indices in ``out``."""
        with self._thread_lock():
            self._check(path, record)
            parts = [self._part(path, record, *block, out) for block in wanted]
            # Objects cannot be shared.
            self._decoded.use_all(parts, in_turn, share=not any(column.dtype.hasobject for column in record.columns))
            self._check(path, record)

    def will_need(self, path: str, record: FileRecord, first: int, last: int) -> None:
        """Do nothing: the library of the format reads ahead by itself."""

    def _part(
        self, path: str, record: FileRecord, number: int, which: Any, indices: Any, out: Sequence[np.ndarray]
    ) -> Chunk:
        """Return a block, of which some rows go to ``out[indices]``. It is kept, whatever is read of it."""
        first, last = blocks_of(record).starts[number : number + 2].tolist()
        count = last - first
        ends = ends_of_columns(record.columns, count)
        columns = partial(columns_in, columns=record.columns, ends=ends, rows=count)

        def make(memory: np.ndarray | None) -> list[np.ndarray]:
            block = self._block(path, record, number)
            if memory is not None:
                for into, values in zip(columns(memory), block, strict=True):
                    into[...] = values
            return block

        def use(block: Any) -> None:
            # A list is a block that this rank has read, else it is memory of the node.
            for values, column in zip(out, block if isinstance(block, list) else columns(block), strict=True):
                values[indices] = column[which]

        lacks = count if count > 1 else 0  # the row of a block of one is not read again in this epoch
        return Chunk((path, self._written.get(path), number), ends[-1], 0, lacks, make, use)

    def _block(self, path: str, record: FileRecord, number: int) -> list[np.ndarray]:
        layout = blocks_of(record)
        first, last = int(layout.starts[number]), int(layout.starts[number + 1])
        try:
            columns = self._format.block(path, record, number)
        except DataFileError:
            raise
        except Exception as error:
            raise DataFileError(
                f"file {path!r}: rows {first} to {last - 1} cannot be read ({type(error).__name__}: {error}); fix: "
                "see the error, and copy or write the file again if it is damaged"
            ) from error
        for column, values in zip(record.columns, columns, strict=True):
            if values.shape != (last - first, *column.shape):
                raise DataFileError(
                    f"file {path!r}, {column.name!r}: rows {first} to {last - 1} have the shape {values.shape}, not "
                    f"{(last - first, *column.shape)}; fix: all rows need one shape"
                )
        return columns

    def _check(self, path: str, record: FileRecord) -> None:
        """Raise if a file has changed since it was described."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataFileError.of_file(
                path, f"it can no longer be found ({error.strerror}); fix: bring it back"
            ) from None
        state = self._format.state(path, [column.name for column in record.columns], status)
        same = state == record.mtime_ns  # else the keys of its blocks change
        if status.st_size != record.size or not (same or self.is_as_described(path, path, record, state)):
            raise changed(path, record.size, status.st_size)

    def __reduce__(self) -> tuple[type[BlockReader], tuple[Any, ...]]:
        return BlockReader, (self._format, self._most_decoded)
