"""Files of lines, plain or compressed by gzip, and the format in which a row is a line of text."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import itertools
import os
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, BinaryIO, ClassVar

import numpy as np

from mpistrat.data import limits
from mpistrat.data.errors import DataFileError, not_of_format, what_it_is
from mpistrat.data.formats.block_reader import BlockFormat, blocks_of, column_in_blocks
from mpistrat.data.formats.contract import left_out, reason, skips
from mpistrat.data.hdf5.records import FileRecord, InBlocks
from mpistrat.process.cache import Cache
from mpistrat.runtime.environment import rc

BLOCK_ROWS = 4096
"""Most rows of a block."""
_PIECE = 1 << 20  # lines may be long: a block has no more bytes than this, and a line


class LineFormat(BlockFormat):
    """A format of lines, in UTF-8 or in an encoding of one byte for each character, also in gzip.

    The places of a layout are where blocks begin, the end of the last one, ``self.extra(record)`` numbers of the
    format, and where rows that are left out begin and end.
    """

    columns_apart: ClassVar[bool] = False

    def __init__(self, encoding: str, on_bad_row: str):
        self._skips = skips(on_bad_row)
        self.filtered = self._skips
        self._encoding = codecs.lookup(encoding).name
        one_byte = len(bytes(range(256)).decode(encoding, "replace")) == 256
        if self._encoding != "utf-8" and not (one_byte and bytes(range(128)).decode(encoding).isascii()):
            raise ValueError(
                f"encoding must be UTF-8, or one byte for each character, not {encoding!r}: convert the files"
            )
        self._unpacked = Cache[tuple[str, int, int], bytes](1)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[tuple[BinaryIO, os.stat_result]]:
        """Open a file, unpacked if gzip has packed it, and yield it with its status."""
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if file.read(2) != b"\x1f\x8b":
                file.seek(0)
                yield file, status
                return
            key = path, status.st_mtime_ns, status.st_size
            if key not in self._unpacked:
                file.seek(0)
                try:
                    # A byte more shows that it is too long.
                    text = gzip.GzipFile(fileobj=file).read(rc.data_block_bytes + 1)
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    message = f"gzip cannot unpack it ({error}); fix: copy or write it again"
                    raise DataFileError.of_file(path, message) from None
                limits.check_bytes(len(text), f"file {path!r}", "its text")
                self._unpacked.keep(key, text)
            yield io.BytesIO(self._unpacked[key]), status

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unpacked": Cache[tuple[str, int, int], bytes](1)}  # not the text, which may be long

    @abstractmethod
    def rows_of(self, path: str, record: FileRecord, text: bytes, first: int, count: int) -> list[np.ndarray]:
        """Return an array for each column, of lines that have about ``count`` rows from row ``first`` on."""

    @abstractmethod
    def row_ends(self, text: bytes) -> np.ndarray:
        """Return where each row of lines ends, its end included."""

    def extra(self, record: FileRecord) -> int:
        """Return how many numbers of its own the format keeps with the places of blocks."""
        return 0

    def block(self, path: str, record: FileRecord, number: int) -> list[np.ndarray]:
        layout = blocks_of(record)
        begin, end = layout.places[number : number + 2].tolist()
        first, last = layout.starts[number : number + 2].tolist()
        spans = layout.places[len(layout.starts) + self.extra(record) :].reshape(-1, 2)
        bad = spans[(spans[:, 0] >= begin) & (spans[:, 1] <= end)].tolist()
        while bad and bad[-1][1] == end:  # of blocks without a good row, which belong to this one
            end = bad.pop()[0]
        parts = []
        with self._opened(path) as (file, _):
            for start, stop in pairwise([begin, *itertools.chain(*bad), end]):
                file.seek(start)
                parts.append(file.read(stop - start))
        # An end of "\r" would take an empty line of "\n" after it for its own; as "\r\n" it cannot.
        text = b"".join(part + b"\n" if part.endswith(b"\r") and bad else part for part in parts[::2])
        return self.rows_of(path, record, text, first, last - first)

    def checked(self, path: str, record: FileRecord) -> FileRecord:
        """Return the record without the rows that cannot be read, if these are to be left out."""
        if not self._skips or not record.rows:
            return record
        layout = blocks_of(record)
        blocks = len(layout.starts) - 1
        offsets, bad, reasons = layout.places[: blocks + 1], [], []
        with self._opened(path) as (file, _):
            line = 1 + _line_ends(file.read(int(offsets[0])))
            for first, (begin, end) in zip(layout.starts.tolist(), pairwise(offsets.tolist()), strict=False):
                file.seek(begin)
                text = file.read(end - begin)
                ends = [0, *self.row_ends(text).tolist()]
                left = [(0, len(ends) - 1)]
                while left:  # halves, until each is without errors or of one row
                    low, high = left.pop()
                    try:
                        self.rows_of(path, record, text[ends[low] : ends[high]], first + low, high - low)
                    except (DataFileError, ValueError, ArithmeticError) as error:
                        if high - low > 1:
                            left += [((low + high) // 2, high), (low, (low + high) // 2)]
                            continue
                        bad.append((begin + ends[low], begin + ends[high]))
                        cause = reason(error).removeprefix(f"file {path!r}").lstrip(",: ")
                        reasons.append(f"line {line + _line_ends(text[: ends[low]])} ({cause})")
                line += _line_ends(text)
        spans = np.array(bad, np.int64).reshape(-1, 2)
        counts = np.diff(layout.starts) - np.histogram(spans[:, 0], offsets)[0]
        filled = np.flatnonzero(counts)  # an empty block belongs to the one before it
        begins = np.cumsum([0, *counts[filled]])
        offsets = np.concatenate([offsets[filled], offsets[-1:], layout.places[blocks + 1 :], spans.ravel()])
        columns = tuple(column._replace(layout=InBlocks(begins, offsets)) for column in record.columns)
        return record._replace(rows=int(begins[-1]), columns=columns, left_out=left_out(reasons))


class Text(LineFormat):
    """Files whose rows are lines of text, without their ends: ``\\n``, ``\\r\\n`` or ``\\r``, as Python reads them."""

    name: ClassVar[str] = "text"
    named: ClassVar[str] = "columns"

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of a file. Reads the file once, to find the lines."""
        require_text(path, "from_text")
        most = rc.data_block_bytes
        try:
            with self._opened(path) as (file, status):
                offset = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
                file.seek(offset)
                rows = 0
                starts: list[int] = []
                offsets: list[int] = []
                while text := file.read(_PIECE):
                    rest = file.readline(most + 1)
                    text += rest
                    ends = _ends(text)
                    begins = np.append(0, ends[:-1])
                    longest = max(len(rest), int((ends - begins).max()))
                    limits.check_bytes(longest, f"file {path!r}", f"a line from row {rows} on")
                    # A block ends where a read ends, so it may have fewer rows.
                    starts += range(rows, rows + len(ends), BLOCK_ROWS)
                    offsets += (offset + begins[::BLOCK_ROWS]).tolist()
                    rows, offset = rows + len(ends), offset + len(text)
        except OSError as error:
            raise DataFileError.unreadable(path, error) from None
        layout = InBlocks(np.array([*starts, rows], np.int64), np.array([*offsets, offset], np.int64))
        column = column_in_blocks(names[0], np.dtype(object), (), layout, BLOCK_ROWS)
        return self.checked(path, FileRecord(status.st_size, status.st_mtime_ns, rows, (column,)))

    def rows_of(self, path: str, record: FileRecord, text: bytes, first: int, count: int) -> list[np.ndarray]:
        try:
            decoded = text.decode(self._encoding)
        except UnicodeDecodeError as error:
            row = first + int(_ends(text).searchsorted(error.start, side="right"))
            raise DataFileError.of_file(
                path, f"row {row} is not {self._encoding} ({error.reason}); fix: give encoding=, or convert it"
            ) from None
        lines = np.empty(count, object)
        lines[:] = decoded.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
        return [lines]

    def row_ends(self, text: bytes) -> np.ndarray:
        return _ends(text)

    def __str__(self) -> str:
        return f"text in {self._encoding}" + (", without bad rows" if self._skips else "")


def _ends(text: bytes) -> np.ndarray:
    """Return where each line ends, its end included. The last line may have none."""
    raw = np.frombuffer(text, np.uint8)
    is_end = raw == ord("\n")
    is_end |= (raw == ord("\r")) & (np.append(raw[1:], 0) != ord("\n"))
    ends = np.flatnonzero(is_end) + 1
    return ends if len(ends) and ends[-1] == len(raw) else np.append(ends, len(raw))


def _line_ends(text: bytes) -> int:
    return text.count(b"\n") + text.count(b"\r") - text.count(b"\r\n")


def require_text(path: str, method: str) -> None:
    """Raise if a file is of another known format than text, or text in gzip."""
    description = what_it_is(path)
    if description and "gzip" not in description:
        raise not_of_format(path, method, "")
