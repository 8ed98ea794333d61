"""File that keeps a manifest between jobs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from mpistrat.data.errors import DataFileError
from mpistrat.data.hdf5.records import FileRecord, from_json, joined_path, to_json, without_times
from mpistrat.process.atomic_file import appearing

_FORMAT = "mpistrat manifest"
_VERSION = 1


def write(path: str, files: Sequence[str], names: Sequence[str], records: Sequence[FileRecord]) -> None:
    """Write the records of these files to ``path``. Their paths are stored relative to its folder."""
    folder = os.path.dirname(path)
    kept = {
        "format": _FORMAT,
        "version": _VERSION,
        "datasets": list(names),
        "files": [
            {"name": os.path.relpath(file, folder), "record": to_json(record)}
            for file, record in zip(files, records, strict=True)
        ],
    }
    try:
        with appearing(path, replace=True) as temporary:
            temporary.write_text(json.dumps(kept))
    except OSError as error:
        what = f"{error.strerror}, so the manifest was not written"
        fix = "fix: name a folder that can be written to, or leave manifest= out"
        raise OSError(error.errno, f"{what}; {fix}", path) from error


def read(path: str, files: Sequence[str], names: Sequence[str]) -> list[FileRecord] | None:
    """Return the records from the manifest ``path``, None if it is absent. Raise DataFileError if it is another."""
    try:
        with open(path, encoding="utf-8") as file:
            kept = json.load(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"{error.strerror}, so the manifest was not read; fix: name another file, or leave manifest= out"
        raise OSError(error.errno, what, path) from error
    except (ValueError, RecursionError) as error:
        raise DataFileError(f"manifest {path!r}: it is not JSON ({error}); {_FIX}") from None
    if not isinstance(kept, dict) or kept.get("format") != _FORMAT or kept.get("version") != _VERSION:
        raise DataFileError(
            f"manifest {path!r}: it is not a {_FORMAT} of version {_VERSION}; fix: give the manifest another name"
        )
    try:
        datasets, then = kept["datasets"], [each["name"] for each in kept["files"]]
        records = [from_json(each["record"]) for each in kept["files"]]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataFileError(f"manifest {path!r}: it is damaged ({error}); {_FIX}") from None
    if datasets != list(names):
        raise _stale(path, f"it describes the datasets {datasets}, but these are {list(names)}")
    now = [os.path.relpath(file, os.path.dirname(path)) for file in files]
    for name in sorted(set(then) - set(now))[:1]:
        raise _stale(path, f"file {name!r} is no longer among the files")
    for name in sorted(set(now) - set(then))[:1]:
        raise _stale(path, f"file {name!r} is new")
    if now != then:
        raise _stale(path, "the files have another order")
    return records


def check(path: str, file: str, record: FileRecord) -> None:
    """Check that a file has not changed since the manifest was written. Raise DataFileError if it has."""
    for name, size, mtime_ns in _parts(file, record):
        try:
            found = os.stat(name)
        except OSError as error:
            raise _stale(path, f"file {name!r} cannot be found ({error.strerror})") from None
        if found.st_size != size:
            raise _stale(path, f"file {name!r} had {size} bytes, and has {found.st_size} now")
        if found.st_mtime_ns != mtime_ns:
            raise _stale(path, f"file {name!r} has been written to, or copied, since then")


def check_same(path: str, file: str, record: FileRecord, found: FileRecord) -> None:
    """Check that a record of the manifest is that of its file, but for times. Raise DataFileError if not."""
    if to_json(without_times(record)) != to_json(without_times(found)):
        raise _stale(path, f"file {file!r} has another description now")


def _parts(file: str, record: FileRecord) -> Iterable[tuple[str, int, int]]:
    yield file, record.size, record.mtime_ns
    for column in record.columns:
        for other in column.others:
            yield joined_path(file, other.path), other.size, other.mtime_ns


_FIX = "fix: remove the manifest, and it will be written again"


def _stale(path: str, what: Any) -> DataFileError:
    return DataFileError(f"manifest {path!r} is stale: {what}; {_FIX}")
