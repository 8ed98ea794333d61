"""Zarr stores on disk, read by zarr: a block is one chunk along axis 0.

Old versions of zarr run code from a store: with the codec ``pickle``, or with a fill value of Python objects, which is
unpickled when an array is opened. So the metadata of the arrays that are read is looked at first, whatever the version.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import os
import re
import struct
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpistrat.arrays.arrays import as_numpy
from mpistrat.data.errors import (
    DataFileError,
    DatasetMismatchError,
    DatasetNotFoundError,
    check_blocks,
    check_bytes,
    check_path,
    not_of_format,
)
from mpistrat.data.formats import cf
from mpistrat.data.formats.block_reader import BlockFormat, blocks_of, column_in_blocks
from mpistrat.data.formats.contract import needed
from mpistrat.data.hdf5.records import Column, FileRecord, InBlocks
from mpistrat.data.rows.spec import in_native_order
from mpistrat.process.cache import Cache

_FILES = (".zarray", "zarr.json", ".zmetadata")  # of version 2, of version 3, and of all arrays of a store together
_FILES_OF_ARRAYS = (".zarray", ".zattrs", "zarr.json")
_LARGEST = 64 << 20
_MOST_KEPT = 256  # open arrays
_KEYS_OF_CODECS = ("id", "name")
_KEYS_OF_DTYPES = ("dtype", "data_type")
_OBJECTS = re.compile(r'"([|<>=]?O\d*|object)"')  # a text in a description of a dtype, which may be one of fields
ITSELF = "."
"""The name of the array of a store that holds a single one."""


def refuse_code(path: str, names: Sequence[str]) -> None:
    """Raise DataFileError if a store's metadata names Python objects or a codec that unpickles, or is too large."""
    files = _Files(path)
    for name in dict.fromkeys([ITSELF, *names]):
        for file in _FILES:
            _refuse_in(files, path, os.path.join(name, file))


class _Files:
    """The files of a store: of a folder, or of a zip archive."""

    def __init__(self, store: str):
        self.store, self.archive = store, None
        if not os.path.isdir(store):
            try:
                self.archive = zipfile.ZipFile(store)
            except (OSError, zipfile.BadZipFile):
                message = "it is no Zarr store; fix: give the folder of one, or one in a zip archive"
                raise not_of_format(store, "from_zarr", message) from None

    def open(self, name: str) -> tuple[Any, int]:
        """Return an open file and its size. Raise OSError if it cannot be opened."""
        if self.archive is None:
            path = os.path.join(self.store, name)
            check_path(path, f"store {self.store!r}")
            file = open(path, "rb")  # noqa: SIM115
            return file, os.fstat(file.fileno()).st_size
        try:
            info = self.archive.getinfo(os.path.normpath(name))
        except KeyError:
            raise FileNotFoundError(name) from None
        if info.compress_type != zipfile.ZIP_STORED:
            check_bytes(info.file_size, f"store {self.store!r}", f"{name!r}, unpacked,")
        return self.archive.open(info), info.file_size


def _refuse_in(files: _Files, store: str, path: str) -> None:
    try:
        with files.open(path)[0] as file:
            text = file.read(_LARGEST + 1)
    except OSError:
        return  # zarr tells what is missing
    if len(text) > _LARGEST:
        raise DataFileError.of_file(store, f"{path!r} is larger than {_LARGEST >> 20} MiB; fix: check where it is from")
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataFileError.of_file(store, f"{path!r} is not JSON ({error}); fix: copy the store again") from None
    for key, value in _entries(metadata):
        if key in _KEYS_OF_CODECS and isinstance(value, str) and "pickle" in value.lower():
            raise DataFileError.of_file(
                store, f"{path!r} names the codec {value!r}, which can run any code; fix: write it with another codec"
            )
        if key in _KEYS_OF_DTYPES and _OBJECTS.search(json.dumps(value)):
            raise DataFileError.of_file(
                store, f"{path!r} has an array of Python objects ({value}); fix: write numbers, or strings of a length"
            )


def _entries(metadata: Any) -> Iterator[tuple[str, Any]]:
    """Yield all keys and values of a JSON value, except in attributes, which may have any name."""
    pending = [metadata]
    while pending:
        entry = pending.pop()
        if isinstance(entry, dict):
            yield from entry.items()
            pending += [value for key, value in entry.items() if key != "attributes"]
        elif isinstance(entry, list):
            pending += entry


class Zarr(BlockFormat):
    """Zarr stores: an array, or a group of arrays. With ``decode``, values are what the CF conventions say."""

    name: ClassVar[str] = "Zarr"
    named: ClassVar[str] = "arrays"
    folders: ClassVar[bool] = True

    def __init__(self, decode: bool = True):
        self._decode = decode
        self._kept = Cache[tuple[str, ...], tuple[int, FileRecord, list[_Opened]]](_MOST_KEPT)

    def __reduce__(self) -> tuple[type[Zarr], tuple[bool]]:
        return Zarr, (self._decode,)

    def __str__(self) -> str:
        return self.name if self._decode else f"{self.name} as stored"

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of some arrays of a store, from its metadata."""
        return self._opened(path, names)[1]

    def _opened(self, path: str, names: Sequence[str]) -> tuple[int, FileRecord, list[_Opened]]:
        """Return the state, the record and the arrays of a store, which is opened once for each state."""
        cached = self._kept.get((path, *names))
        if cached is not None and cached[0] == self.state(path, names, os.stat(path)):
            return cached
        refuse_code(path, names)
        status = os.stat(path)
        state = self.state(path, names, status)
        store, files = _store(path), _Files(path)
        arrays = [_array(store, path, name) for name in names]
        lengths = {name: array.shape[0] for name, array in zip(names, arrays, strict=True)}
        rows = arrays[0].shape[0]
        if len(set(lengths.values())) > 1:
            raise DatasetMismatchError(
                f"store {path!r}: its arrays have the lengths {lengths}; fix: arrays read together must be equally long"
            )
        # All columns have the same blocks. A chunk in two of them is decoded twice, so the largest array has none.
        largest = max(arrays, key=lambda array: array.nbytes)
        step = max(1, _stored_chunk(largest)[0])
        for array in arrays:
            count = math.prod(-(-size // chunk) for size, chunk in zip(array.shape, _stored_chunk(array), strict=True))
            check_blocks(count, f"store {path!r}")
        layout = InBlocks(np.append(np.arange(0, rows, step), rows), np.empty(0, np.int64))
        columns, opened = [], []
        for name, array in zip(names, arrays, strict=True):
            where = f"store {path!r}, array {name!r}"
            column = column_in_blocks(name, array.dtype, tuple(array.shape[1:]), layout, step)
            columns.append(cf.decoded(column, _attributes(array), where) if self._decode else column)
            opened.append(_Opened(array, _codecs_of(files, name), files, name, where))
        record = FileRecord(status.st_size, status.st_mtime_ns, rows, tuple(columns))
        return self._kept.keep((path, *names), (state, record, opened))

    def block(self, path: str, record: FileRecord, number: int) -> list[np.ndarray]:
        first, last = blocks_of(record).starts[number : number + 2].tolist()
        arrays = self._opened(path, [column.name for column in record.columns])[2]
        return [array.rows(first, last, column) for array, column in zip(arrays, record.columns, strict=True)]

    def state(self, path: str, names: Sequence[str], status: os.stat_result) -> int:
        """Return a number that changes when the store, or the metadata of one of its arrays, is written to."""
        stats = [status]
        for file in (os.path.join(path, name, file_name) for name in names for file_name in _FILES_OF_ARRAYS):
            with contextlib.suppress(OSError):
                stats.append(os.stat(file))
        return hash(tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats))


class _Opened(NamedTuple):
    """An open array, its codecs, and the files of its store."""

    array: Any
    codecs: list[dict[str, Any]]
    files: _Files
    name: str
    where: str

    def rows(self, first: int, last: int, column: Column) -> np.ndarray:
        """Return some rows, decoded."""
        shape = _stored_chunk(self.array)
        for name in _chunk_files(self.array, first, last):
            _check_file(self.files, os.path.join(self.name, name), self.codecs, shape, self.where)
        values = in_native_order(as_numpy(self.array[first:last]))
        return cf.decode(values, column.attributes, self.where) if column.attributes else values


def _attributes(array: Any) -> dict[str, Any]:
    """Return the attributes of an array. Where xarray takes the fill value for a missing one, so does this."""
    attributes = dict(array.attrs)
    fill = attributes.get("_FillValue")
    if getattr(getattr(array, "metadata", None), "zarr_format", 2) == 2:
        if array.fill_value is not None and "_ARRAY_DIMENSIONS" in attributes:
            attributes["_FillValue"] = array.fill_value
    elif isinstance(fill, str) and array.dtype.kind == "f":
        attributes["_FillValue"] = np.frombuffer(base64.b64decode(fill), "<f8")
    return attributes


def _stored_chunk(array: Any) -> tuple[int, ...]:
    """Return the shape of a shard, or of a chunk without shards: what has a file of its own."""
    return getattr(array, "shards", None) or array.chunks


def _chunk_files(array: Any, first: int, last: int) -> Iterator[str]:
    """Yield the names of the files of an array that have some rows."""
    step, *steps = _stored_chunk(array)
    across = (range(-(-size // chunk)) for size, chunk in zip(array.shape[1:], steps, strict=True))
    for corner in itertools.product(range(first // step, -(-last // step)), *across):
        if hasattr(array, "metadata"):
            yield array.metadata.encode_chunk_key(corner)
        else:  # zarr 2 does not say in public which of these
            yield from (separator.join(map(str, corner)) for separator in "./")


def _store(path: str) -> Any:
    zarr = needed("zarr", "Zarr stores")
    try:
        # Consolidated metadata may name arrays that are no longer there, or have another shape. zarr 2 does not use it.
        alone = {} if zarr.__version__.startswith("2.") else {"use_consolidated": False}
        return zarr.open(path if os.path.isdir(path) else zarr.storage.ZipStore(path, mode="r"), mode="r", **alone)
    except Exception as error:
        raise not_of_format(
            path, "from_zarr", f"it is not a Zarr store ({type(error).__name__}: {error}); fix: check the path"
        ) from None


def _array(store: Any, path: str, name: str) -> Any:
    array = store
    if name != ITSELF:
        try:
            array = store[name]
        except Exception:
            array = None
    if not hasattr(array, "chunks"):
        has = sorted(store) if hasattr(store, "array_keys") else "a single array"
        raise DatasetNotFoundError(f"store {path!r} has no array {name!r}; it has {has}; fix: name one of these")
    if not array.shape:
        raise DatasetMismatchError(f"store {path!r}, array {name!r}: a scalar; fix: axis 0 must be that of the samples")
    return array


# --- the lengths in the files of chunks, compared before zarr believes them -------------
#
# zarr takes an empty file for one that does not exist. Blosc reads as many bytes as the header of a chunk says, also
# beyond the end of the chunk.

_BLOSC = struct.Struct("<4x3I")  # sizes of the decoded chunk, of a block, and of the stored chunk
_ABSENT = 2**64 - 1


def _codecs_of(files: _Files, array: str) -> list[dict[str, Any]]:
    """Return the codecs of an array as version 3 names them, as far as lengths need them."""
    for name in ("zarr.json", ".zarray"):
        try:
            with files.open(os.path.join(array, name))[0] as file:
                metadata = json.load(file)
        except FileNotFoundError:
            continue
        return metadata["codecs"] if "codecs" in metadata else [{"name": (metadata["compressor"] or {}).get("id")}]
    return []


def _check_file(files: _Files, path: str, codecs: list[dict[str, Any]], shape: tuple[int, ...], where: str) -> None:
    """Check the lengths in the file of a chunk or a shard, if there is one. Raise DataFileError if they do not fit."""
    try:
        file, size = files.open(path)
        with file:
            if not size:
                raise ValueError("it has 0 bytes")
            _check_chunk(file, 0, size, codecs, shape, where)
    except (FileNotFoundError, IsADirectoryError):
        return
    except (ValueError, struct.error) as error:
        raise DataFileError(f"{where}: {path!r}: {error}; fix: it is damaged, copy or write it again") from None


def _check_chunk(
    file: Any, start: int, size: int, codecs: list[dict[str, Any]], shape: tuple[int, ...], where: str
) -> None:
    # The last codec is the one that has made the bytes of the file.
    kind = str(codecs[-1].get("name")).removeprefix("numcodecs.") if codecs else ""
    if kind == "blosc":
        nbytes, _, stored = _BLOSC.unpack(_part(file, min(_BLOSC.size, size), start))
        if stored != size:
            raise ValueError(f"a Blosc chunk of {size} bytes says that it has {stored}")
        check_bytes(nbytes, where, "a Blosc chunk")
    elif kind == "sharding_indexed":
        configuration = codecs[-1]["configuration"]
        index = configuration["index_codecs"]
        if [codec["name"] for codec in index] not in (["bytes"], ["bytes", "crc32c"]):
            raise DataFileError(f"{where}: its shards have an index by the codecs {index}; fix: write it by others")
        inner = tuple(configuration["chunk_shape"])
        count = 16 * (math.prod(shape) // math.prod(inner))  # offset and length of each inner chunk
        length = count + 4 * (len(index) - 1)  # and the crc32c of these
        if length > size:
            raise ValueError(f"a shard of {size} bytes has an index of {length}")
        order = ">" if index[0].get("configuration", {}).get("endian") == "big" else "<"
        at = start if configuration.get("index_location") == "start" else start + size - length
        for offset, nbytes in np.frombuffer(_part(file, count, at), f"{order}u8").reshape(-1, 2).tolist():
            if offset == nbytes == _ABSENT:
                continue
            if not nbytes or offset + nbytes > size:
                raise ValueError(f"a shard of {size} bytes has a chunk of {nbytes} at {offset}")
            _check_chunk(file, start + offset, nbytes, configuration["codecs"], inner, where)


def _part(file: Any, size: int, start: int) -> bytes:
    file.seek(start)
    return bytes(file.read(size))
