"""Files of lines, plain or compressed by gzip, and the format in which a row is a line of text."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, ClassVar

import numpy as np

from mpistrat.data import limits
from mpistrat.data.errors import DataFileError, not_of_format, what_it_is
from mpistrat.data.formats.block_reader import BlockFormat, blocks_of, column_in_blocks
from mpistrat.data.hdf5.records import FileRecord, InBlocks
from mpistrat.process.cache import Cache
from mpistrat.runtime.environment import rc

BLOCK_ROWS = 4096
"""Most rows of a block."""
_PIECE = 1 << 20  # lines may be long: a block has no more bytes than this, and a line


class LineFormat(BlockFormat):
    """A format of lines, in UTF-8 or in an encoding of one byte for each character, also in gzip."""

    columns_apart: ClassVar[bool] = False

    def __init__(self, encoding: str):
        self._encoding = codecs.lookup(encoding).name
        one_byte = len(bytes(range(256)).decode(encoding, "replace")) == 256
        if self._encoding != "utf-8" and not (one_byte and bytes(range(128)).decode(encoding).isascii()):
            raise ValueError(
                f"encoding must be UTF-8, or one byte for each character, not {encoding!r}: convert the files"
            )
        self._unpacked = Cache[tuple[str, int, int], bytes](1)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[tuple[BinaryIO, os.stat_result]]:
        """Open a file to read, or what it is when unpacked by gzip, and its state."""
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if file.read(2) != b"\x1f\x8b":
                file.seek(0)
                yield file, found
                return
            key = path, found.st_mtime_ns, found.st_size
            if key not in self._unpacked:
                file.seek(0)
                try:
                    text = gzip.GzipFile(fileobj=file).read(rc.data_block_bytes + 1)
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    what = f"gzip cannot unpack it ({error}); fix: copy or write it again"
                    raise DataFileError.of_file(path, what) from None
                limits.check_bytes(len(text), f"file {path!r}", "its text")
                self._unpacked.keep(key, text)
            yield io.BytesIO(self._unpacked[key]), found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unpacked": Cache[tuple[str, int, int], bytes](1)}


class Text(LineFormat):
    """Files whose rows are lines of text, without their ends: ``\\n``, ``\\r\\n`` or ``\\r``, as Python reads them."""

    name: ClassVar[str] = "text"
    named: ClassVar[str] = "columns"

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of a file. Reads the file once, to find the lines."""
        require_text(path, "from_text")
        most = rc.data_block_bytes
        try:
            with self._opened(path) as (file, found):
                place = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
                file.seek(place)
                rows = 0
                starts: list[int] = []
                places: list[int] = []
                while text := file.read(_PIECE):
                    rest = file.readline(most + 1)
                    text += rest
                    ends = _ends(text)
                    begins = np.append(0, ends[:-1])
                    longest = max(len(rest), int((ends - begins).max()))
                    limits.check_bytes(longest, f"file {path!r}", f"a line from row {rows} on")
                    starts += range(rows, rows + len(ends), BLOCK_ROWS)
                    places += (place + begins[::BLOCK_ROWS]).tolist()
                    rows, place = rows + len(ends), place + len(text)
        except OSError as error:
            raise DataFileError.unreadable(path, error) from None
        layout = InBlocks(np.array([*starts, rows], np.int64), np.array([*places, place], np.int64))
        column = column_in_blocks(names[0], np.dtype(object), (), layout, BLOCK_ROWS)
        return FileRecord(found.st_size, found.st_mtime_ns, rows, (column,))

    def block(self, path: str, record: FileRecord, number: int) -> list[np.ndarray]:
        layout = blocks_of(record)
        begin, end = layout.places[number : number + 2].tolist()
        first, last = layout.starts[number : number + 2].tolist()
        with self._opened(path) as (file, _):
            file.seek(begin)
            raw = file.read(end - begin)
        try:
            text = raw.decode(self._encoding)
        except UnicodeDecodeError as error:
            row = first + int(_ends(raw).searchsorted(error.start, side="right"))
            raise DataFileError.of_file(
                path, f"row {row} is not {self._encoding} ({error.reason}); fix: give encoding=, or convert it"
            ) from None
        lines = np.empty(last - first, object)
        lines[:] = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
        return [lines]

    def __str__(self) -> str:
        return f"text in {self._encoding}"


def _ends(text: bytes) -> np.ndarray:
    """Return where each line ends, its end included. The last line may have none."""
    raw = np.frombuffer(text, np.uint8)
    ends = raw == ord("\n")
    ends |= (raw == ord("\r")) & (np.append(raw[1:], 0) != ord("\n"))
    found = np.flatnonzero(ends) + 1
    return found if len(found) and found[-1] == len(raw) else np.append(found, len(raw))


def require_text(path: str, method: str) -> None:
    """Raise if a file is of another known format than text, or text in gzip."""
    what = what_it_is(path)
    if what and "gzip" not in what:
        raise not_of_format(path, method, "")
