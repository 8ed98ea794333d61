"""Zarr stores on disk, read by zarr: a block is one chunk along axis 0.

Old versions of zarr run code from a store: with the codec ``pickle``, or with a fill value of Python objects, which is
unpickled when an array is opened. So the metadata of the arrays that are read is looked at first, whatever the version.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from mpistrat.arrays.arrays import as_numpy
from mpistrat.data import limits
from mpistrat.data.errors import DataFileError, DatasetMismatchError, DatasetNotFoundError
from mpistrat.data.formats.block_reader import BlockFormat, blocks_of, column_in_blocks
from mpistrat.data.formats.contract import needed
from mpistrat.data.hdf5.records import FileRecord, InBlocks
from mpistrat.data.hdf5.signatures import not_of_format
from mpistrat.data.rows.spec import in_native_order

_FILES = (".zarray", "zarr.json", ".zmetadata")  # of version 2, of version 3, and of all arrays of a store together
_LARGEST = 64 << 20
_KEYS_OF_CODECS = ("id", "name")
_KEYS_OF_DTYPES = ("dtype", "data_type")
_OBJECTS = re.compile(r"[|<>=]?O\d*|object")
ITSELF = "."
"""The name of the array of a store that holds a single one."""


def refuse_code(path: str, names: Sequence[str]) -> None:
    """Raise DataFileError if a store's metadata names Python objects or a codec that unpickles, or is too large."""
    if not os.path.isdir(path):
        raise not_of_format(path, "from_zarr", "it is no Zarr store; fix: give the folder of one, unpacked")
    for folder in dict.fromkeys([path, *(os.path.join(path, name) for name in names)]):
        for file in _FILES:
            _refuse_in(path, os.path.join(folder, file))


def _refuse_in(store: str, path: str) -> None:
    limits.check_path(path, f"store {store!r}")
    try:
        with open(path, "rb") as file:
            text = file.read(_LARGEST + 1)
    except OSError:
        return  # zarr tells what is missing
    if len(text) > _LARGEST:
        raise DataFileError.of_file(store, f"{path!r} is larger than {_LARGEST >> 20} MiB; fix: check where it is from")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataFileError.of_file(store, f"{path!r} is not JSON ({error}); fix: copy the store again") from None
    for key, value in _entries(found):
        if key in _KEYS_OF_CODECS and isinstance(value, str) and "pickle" in value.lower():
            raise DataFileError.of_file(
                store, f"{path!r} names the codec {value!r}, which can run any code; fix: write it with another codec"
            )
        if key in _KEYS_OF_DTYPES and any(map(_OBJECTS.fullmatch, _texts(value))):
            raise DataFileError.of_file(
                store, f"{path!r} has an array of Python objects ({value}); fix: write numbers, or strings of a length"
            )


def _entries(found: Any) -> Iterator[tuple[str, Any]]:
    """Yield all keys and values of a JSON value, but those that the writer of a store chooses freely."""
    pending = [found]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            yield from each.items()
            pending += [value for key, value in each.items() if key != "attributes"]
        elif isinstance(each, list):
            pending += each


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a description of a dtype, which may be one of fields."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, (list, dict)):
            pending += each.values() if isinstance(each, dict) else each


class Zarr(BlockFormat):
    """Zarr stores: an array, or a group of arrays."""

    name: ClassVar[str] = "Zarr"
    named: ClassVar[str] = "arrays"
    folders: ClassVar[bool] = True

    def describe(self, path: str, names: Sequence[str]) -> FileRecord:
        """Return the record of some arrays of a store, from its metadata."""
        refuse_code(path, names)
        store = _opened(path)
        arrays = [_array(store, path, name) for name in names]
        lengths = {name: array.shape[0] for name, array in zip(names, arrays, strict=True)}
        rows = arrays[0].shape[0]
        if len(set(lengths.values())) > 1:
            raise DatasetMismatchError(
                f"store {path!r}: its arrays have the lengths {lengths}; fix: arrays read together must be equally long"
            )
        largest = max(arrays, key=lambda each: each.nbytes)
        step = max(1, _stored_chunk(largest)[0])
        for array in arrays:
            files = math.prod(-(-size // chunk) for size, chunk in zip(array.shape, _stored_chunk(array), strict=True))
            limits.check_blocks(files, f"store {path!r}")
        layout = InBlocks(np.append(np.arange(0, rows, step), rows), np.empty(0, np.int64))
        columns = [
            column_in_blocks(name, array.dtype, tuple(array.shape[1:]), layout, step)
            for name, array in zip(names, arrays, strict=True)
        ]
        found = os.stat(path)
        return FileRecord(found.st_size, found.st_mtime_ns, rows, tuple(columns))

    def block(self, path: str, record: FileRecord, number: int) -> list[np.ndarray]:
        refuse_code(path, [column.name for column in record.columns])
        store = _opened(path)
        first, last = blocks_of(record).starts[number : number + 2].tolist()
        arrays = [(_array(store, path, column.name), column.name) for column in record.columns]
        for array, name in arrays:
            for file in _chunk_files(array, first, last):
                limits.check_path(os.path.join(path, name, file), f"store {path!r}, array {name!r}")
        return [in_native_order(as_numpy(array[first:last])) for array, _ in arrays]


def _stored_chunk(array: Any) -> tuple[int, ...]:
    """Return the shape of what has a file of its own."""
    return getattr(array, "shards", None) or array.chunks


def _chunk_files(array: Any, first: int, last: int) -> Iterator[str]:
    """Yield the names of the files of an array that have some rows."""
    step, *steps = _stored_chunk(array)
    across = (range(-(-size // chunk)) for size, chunk in zip(array.shape[1:], steps, strict=True))
    for place in itertools.product(range(first // step, -(-last // step)), *across):
        if hasattr(array, "metadata"):
            yield array.metadata.encode_chunk_key(place)
        else:  # zarr 2 does not say in public which of these
            yield from (separator.join(map(str, place)) for separator in "./")


def _opened(path: str) -> Any:
    zarr = needed("zarr", "Zarr stores")
    try:
        return zarr.open(path, mode="r")
    except Exception as error:
        raise not_of_format(
            path, "from_zarr", f"it is not a Zarr store ({type(error).__name__}: {error}); fix: check the path"
        ) from None


def _array(store: Any, path: str, name: str) -> Any:
    found = store
    if name != ITSELF:
        try:
            found = store[name]
        except Exception:
            found = None
    if not hasattr(found, "chunks"):
        has = sorted(store) if hasattr(store, "array_keys") else "a single array"
        raise DatasetNotFoundError(f"store {path!r} has no array {name!r}; it has {has}; fix: name one of these")
    if not found.shape:
        raise DatasetMismatchError(f"store {path!r}, array {name!r}: a scalar; fix: axis 0 must be that of the samples")
    return found
