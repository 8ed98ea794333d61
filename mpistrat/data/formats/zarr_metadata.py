"""What the metadata of a Zarr store may say, looked at before zarr does.

Old versions of zarr run code from a store: with the codec ``pickle``, or with a fill value of Python objects, which is
unpickled when an array is opened. So the metadata of the arrays that are read is looked at first, whatever the version.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mpistrat.data import named_files
from mpistrat.data.errors import DataFileError
from mpistrat.data.hdf5.signatures import not_of_format

_FILES = (
    ".zarray",
    "zarr.json",
    ".zmetadata",
)  # of version 2, of version 3, and of all arrays of a store together
_LARGEST = 64 << 20
_KEYS_OF_CODECS = ("id", "name")
_KEYS_OF_DTYPES = ("dtype", "data_type")
_OBJECTS = re.compile(r"[|<>=]?O\d*|object")


def refuse_code(path: str, names: Sequence[str]) -> None:
    """Refuse a store whose metadata names Python objects, or a codec that unpickles.

    Raises
    ------
    DataFileError
        If it does, if its metadata is larger than 64 MiB, or if the store is not a folder.
    """
    if not os.path.isdir(path):
        raise not_of_format(path, "from_zarr", "it is no Zarr store; fix: give the folder of one, unpacked")
    for folder in dict.fromkeys([path, *(os.path.join(path, name) for name in names)]):
        for file in _FILES:
            _refuse_in(path, os.path.join(folder, file))


def _refuse_in(store: str, path: str) -> None:
    named_files.check(path, f"store {store!r}")
    try:
        with open(path, "rb") as file:
            text = file.read(_LARGEST + 1)
    except OSError:
        return  # zarr tells what is missing
    if len(text) > _LARGEST:
        raise DataFileError.of_file(
            store, f"{path!r} is larger than {_LARGEST >> 20} MiB; fix: check where it is from"
        )
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataFileError.of_file(
            store, f"{path!r} is not JSON ({error}); fix: copy the store again"
        ) from None
    for key, value in _entries(found):
        if key in _KEYS_OF_CODECS and isinstance(value, str) and "pickle" in value.lower():
            raise DataFileError.of_file(
                store,
                f"{path!r} names the codec {value!r}, which can run any code; fix: write it with another codec",
            )
        if key in _KEYS_OF_DTYPES and any(map(_OBJECTS.fullmatch, _texts(value))):
            raise DataFileError.of_file(
                store,
                f"{path!r} has an array of Python objects ({value}); fix: write numbers, or strings of a length",
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
