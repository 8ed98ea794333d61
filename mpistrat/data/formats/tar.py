"""Tar archives of samples, as WebDataset writes them, and the decoding of images by Pillow."""

from __future__ import annotations

import io
import math
import os
import re
import tarfile
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from mpistrat.data.errors import DataFileError, DatasetNotFoundError, check_bytes, not_of_format
from mpistrat.data.formats.block_reader import BlockFormat, column_in_blocks, layout_of
from mpistrat.data.formats.contract import left_out, needed, reason, skips
from mpistrat.data.formats.npy import header
from mpistrat.data.hdf5.records import FileRecord, InBlocks

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")  # WebDataset's: all up to the first dot of the file's own name
_IMAGES = {"jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "bmp", "gif", "tif", "tiff", "webp"}
_TEXTS = {"txt", "text", "transcript", "json"}
_INTEGERS = {"cls", "cls2", "class", "count", "index", "inx", "id"}
_END, _PIECE = 1024, 1 << 20  # bytes of zeros that end an archive, and bytes read at once to see that nothing follows
_RANGES = {"I": 1, "F": 2}  # Pillow's modes of more than 8 bits, by the first letter: integers, numbers


def image_of(file: Any, path: str, size: tuple[int, int] | None, mode: str) -> np.ndarray:
    """Return an image. Raise DataFileError, which names ``path``, if it cannot be read or ``mode`` cuts values off."""
    pillow = needed("PIL.Image", "images")
    try:
        with pillow.open(file) as image:
            stored_mode, converted = image.mode, image.convert(mode)
            values = np.array(converted if size is None else converted.resize(size[::-1]))
    except Exception as error:  # of any format of images
        if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None:
            raise  # which says nothing about the image
        raise DataFileError.of_file(path, f"it cannot be read ({error}); fix: copy it again, or remove it") from error
    if _RANGES.get(stored_mode[0], 0) > _RANGES.get(mode[0], 0):  # Pillow has cut large values off
        raise DataFileError.of_file(
            path, f"its values, of mode {stored_mode!r}, do not fit {mode!r}; fix: give mode='{stored_mode[0]}'"
        )
    return values


class Tar(BlockFormat):
    """Tar archives without compression: neighbours whose names differ only after the first dot are a sample.

    A sample is a block, and the places of a column are offset and size of its field in each sample.
    """

    name: ClassVar[str] = "tar"
    named: ClassVar[str] = "fields"

    def __init__(self, size: tuple[int, int] | None, mode: str, decode: bool, on_bad_row: str):
        self._size, self._mode, self._decodes = size, mode, decode
        self._skips = self.filtered = skips(on_bad_row)

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of some fields of a file, by the headers in it. Its first sample is read for its shapes."""
        try:
            status = os.stat(path)
            samples = _samples(path)
        except OSError as error:
            raise DataFileError.unreadable(path, error) from None
        except tarfile.TarError as error:
            message = f"it is not a tar archive without compression ({error}); fix: unpack it, or write it again"
            raise not_of_format(path, "from_tar", message) from None
        rows: list[list[int]] = []
        bad: list[str] = []
        first: list[np.ndarray] = [np.empty(0, object)] * len(names)
        for key, members in samples.items():
            try:
                row = [number for name in names for number in _member(path, key, members, name)]
                # The first sample decides about the dtypes and shapes of all.
                if not rows:
                    first = self._row(path, row, names)
                elif self._skips:
                    self._checked(
                        path, repr(key), self._row(path, row, names), [(field.dtype, field.shape) for field in first]
                    )
            except (DataFileError, DatasetNotFoundError) as error:
                if not self._skips:
                    raise
                bad.append(f"sample {key!r} ({reason(error)})")
                continue
            rows.append(row)
        starts, extents = np.arange(len(rows) + 1), np.array(rows, np.int64).reshape(len(rows), len(names), 2)
        columns = [
            column_in_blocks(name, value.dtype, value.shape, InBlocks(starts, extents[:, at].ravel()), 1)
            for at, (name, value) in enumerate(zip(names, first, strict=True))
        ]
        return FileRecord(status.st_size, status.st_mtime_ns, len(rows), tuple(columns), left_out(bad))

    def block(self, path: str, record: FileRecord, number: int) -> list[np.ndarray]:
        names = [column.name for column in record.columns]
        extents = [int(at) for column in record.columns for at in layout_of(column).places[2 * number : 2 * number + 2]]
        values = self._row(path, extents, names)
        expected = [(column.stored, column.shape) for column in record.columns]
        return [value[None] for value in self._checked(path, f"number {number}", values, expected)]

    def _checked(self, path: str, key: str, values: list[np.ndarray], expected: Sequence[Any]) -> list[np.ndarray]:
        """Return the values of a sample. Raise DataFileError if one is not of the dtype and shape of the first one."""
        for value, first in zip(values, expected, strict=True):
            if (value.dtype, value.shape) != first:
                ours, its = (
                    "{} of shape {}".format(*description) for description in ((value.dtype, value.shape), first)
                )
                message = f"sample {key} has {ours}, and the first one {its}"
                fix = "give size= for images, or decode=False and a function of map"
                raise DataFileError.of_file(path, f"{message}; fix: {fix}")
        return values

    def _row(self, path: str, extents: Sequence[int], names: Sequence[str]) -> list[np.ndarray]:
        """Return the values of a sample, whose fields have these offsets and sizes."""
        values = []
        with open(path, "rb") as file:
            for name, offset, size in zip(names, extents[::2], extents[1::2], strict=True):
                check_bytes(size, f"file {path!r}", f"a field {name!r}")
                file.seek(offset)
                values.append(self._value(name, file.read(size), f"{path}, field {name!r} at byte {offset}"))
        return values

    def _value(self, name: str, raw: bytes, where: str) -> np.ndarray:
        end = name.partition(";")[0].rpartition(".")[2]
        try:
            if self._decodes and end in _INTEGERS:
                return np.array(int(raw))
            if self._decodes and end == "npy":
                return _array_of(raw)
            if self._decodes and end in _IMAGES:
                return image_of(io.BytesIO(raw), where, self._size, self._mode)
            value = np.empty((), object)
            value[()] = raw.decode() if self._decodes and end in _TEXTS else raw
            return value
        except ValueError as error:
            raise DataFileError.of_file(where, f"it cannot be decoded ({error}); fix: write it again") from None

    def __str__(self) -> str:
        without = ", without bad samples" if self._skips else ""
        return f"tar, size={self._size}, mode={self._mode!r}, decode={self._decodes}{without}"


def _samples(path: str) -> dict[str, dict[str, tuple[int, int]]]:
    """Return offset and size of the members of each sample, by what follows the first dot of their names."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    last = None
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            match = _NAME.fullmatch(member.name)
            if not match or not member.isreg() or member.issparse():
                continue
            key, end = match[1], match[2].lower()
            if end in samples.get(key, ()) or (key in samples and key != last):
                message = f"sample {key!r} has two members {end!r}, or is not in one piece"
                raise DataFileError.of_file(path, f"{message}; fix: write the members of a sample one after another")
            samples.setdefault(key, {})[end] = member.offset_data, member.size
            last = key
        end_of_samples = archive.offset
    # The library takes a header that it cannot read for the end.
    with open(path, "rb") as file:
        file.seek(end_of_samples)
        pieces = iter(partial(file.read, _PIECE), b"")
        if os.path.getsize(path) - end_of_samples < _END or any(piece.strip(b"\0") for piece in pieces):
            message = f"it does not end as a tar archive does after {len(samples)} samples, at byte {end_of_samples}"
            raise DataFileError.of_file(path, f"{message}; fix: copy it again, and give joined archives one by one")
    return samples


def _array_of(raw: bytes) -> np.ndarray:
    """Return the array of an npy file. Raise ValueError if it is not one, or is not as large as it claims."""
    file = io.BytesIO(raw)
    try:
        shape, columns_first, dtype = header(file)
    except EOFError as error:
        raise ValueError(str(error)) from None
    if dtype.hasobject or min(shape, default=0) < 0 or file.tell() + math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"an array of {dtype} and shape {shape} in {len(raw)} bytes")
    return np.frombuffer(raw, dtype, offset=file.tell()).reshape(shape, order="F" if columns_first else "C")


def _member(path: str, key: str, members: dict[str, tuple[int, int]], name: str) -> tuple[int, int]:
    """Return offset and size of a field of a sample: of the first of the names, which semicolons separate."""
    for field in name.split(";"):
        if field in members:
            return members[field]
    raise DatasetNotFoundError(
        f"file {path!r}: sample {key!r} has no field {name!r}; it has {', '.join(map(repr, members))}; fix: name one "
        "of these, or several as 'jpg;png'"
    )
