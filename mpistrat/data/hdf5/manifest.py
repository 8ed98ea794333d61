"""Manifest of a dataset: a description of each file, made once by one rank for all, and kept in a file."""

from __future__ import annotations

import base64
import glob
import hashlib
import json
import logging
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpistrat.data import errors
from mpistrat.data.errors import what_it_is
from mpistrat.data.hdf5.records import (
    Column,
    FileRecord,
    check_limits,
    from_json,
    joined_path,
    to_json,
    varying,
    without_times,
)
from mpistrat.data.rows.blocks import Blocks, WholeChunks, chunk_rows_of
from mpistrat.data.rows.contracts import warn_together
from mpistrat.process.files import appearing, local_path
from mpistrat.representation import grouped
from mpistrat.runtime.topology import Topology

_ENDS = {"HDF5": "h5", "netCDF": "nc"}  # of other formats, the name in small letters


class FileList:
    """The files of a path, a glob pattern, or an iterable of these. They are listed when first needed.

    They keep the given order; matches of a pattern are sorted. ``format`` says in messages what they are, and
    ``folders`` whether a "file" is a folder. Raise TypeError or ValueError for what is not a path.
    """

    def __init__(self, files: Any, format: str = "HDF5", folders: bool = False):
        self._format, self._folders = format, folders
        if isinstance(files, (str, bytes, os.PathLike)):
            files = [files]
        self.given_names: list[str] = []
        for file in files:
            if not isinstance(file, (str, bytes, os.PathLike)):
                raise TypeError(f"files are named by strings or paths, not {file!r}")
            self.given_names.append(os.path.abspath(local_path(file)))
        if not self.given_names:
            raise ValueError("a dataset needs at least one file, but the list of files is empty")
        self._paths: Sequence[str] | None = None

    def paths(self) -> Sequence[str]:
        """Return the absolute paths. Raise FileNotFoundError for a missing file, IsADirectoryError for a folder."""
        if self._paths is None:
            self._paths = [path for name in self.given_names for path in _matches(name, self._folders, self._format)]
        return self._paths

    def take(self, paths: Sequence[str]) -> None:
        """Take the paths that another rank has found."""
        self._paths = paths

    def names(self) -> str:
        """Return the number of given names and a hash of them, without folders, which may differ between nodes."""
        text = "/".join(os.path.basename(name) for name in self.given_names)
        digest = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=6).hexdigest()
        return f"files of {len(self.given_names)} names (which hash to {digest})"

    def __len__(self) -> int:
        return len(self.given_names if self._paths is None else self._paths)

    def __repr__(self) -> str:
        return (
            self.given_names[0]
            if self._paths is None and len(self.given_names) == 1
            else f"{len(self)} {self._format} files"
        )


def _once(paths: list[str]) -> list[str]:
    """Return each file once, if links to folders lead to it again. Paths without links, and short ones, win."""
    real = {folder: os.path.realpath(folder) for folder in set(map(os.path.dirname, paths))}
    by_target = grouped(((real[os.path.dirname(path)], os.path.basename(path)), path) for path in paths)

    def worse(path: str) -> tuple[bool, int, str]:
        folder = os.path.dirname(path)
        return real[folder] != folder, path.count(os.sep), path

    return sorted(min(aliases, key=worse) for aliases in by_target.values())


def _matches(name: str, folders: bool, format_name: str) -> list[str]:
    if os.path.isdir(name) and not folders:
        if description := what_it_is(name):
            raise IsADirectoryError(f"{name!r}: {description}")
        pattern = os.path.join(name, f"*.{_ENDS.get(format_name, format_name.lower())}")
        raise IsADirectoryError(f"{name!r} is a directory: give a pattern such as {pattern!r}")
    if os.path.exists(name):
        errors.check_path(name)
        return [name]
    if not glob.has_magic(name):
        raise FileNotFoundError(f"file {name!r} does not exist: check the path, also on the other nodes")
    archives = folders and name.endswith(".zip")  # a Zarr store is a folder or a zip archive
    paths = sorted(path for path in glob.glob(name, recursive=True) if os.path.isdir(path) == folders or archives)
    for path in paths:
        errors.check_path(path)
    if "**" in name:
        paths = _once(paths)  # such a pattern follows links
    if not paths:
        raise FileNotFoundError(f"pattern {name!r} matches no file: check the path, also on the other nodes")
    return paths


_log = logging.getLogger("mpistrat.data")
_MOST_IN_IDENTITY = 64 << 10
_FORMAT = "mpistrat manifest"
_VERSION = 1
_FIX = "fix: remove the manifest, and it will be written again"


class Manifest(NamedTuple):
    """The files that have rows, their records, and the number of the first row of each; the last offset counts all."""

    files: tuple[str, ...]
    records: tuple[FileRecord, ...]
    offsets: np.ndarray

    @classmethod
    def of(cls, files: Sequence[str], records: Sequence[FileRecord]) -> Manifest:
        """Return the manifest of these files."""
        rows = [record.rows for record in records]
        return cls(tuple(files), tuple(records), np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]))

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns, as in the first file."""
        return self.records[0].columns

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row of all columns."""
        return sum(column.row_bytes for column in self.columns)

    @property
    def rows(self) -> int:
        """Number of all rows."""
        return int(self.offsets[-1])

    def file(self, number: int) -> tuple[str, FileRecord, int]:
        """Return path and record of a file, and the number of its first row."""
        return self.files[number], self.records[number], int(self.offsets[number])

    def blocks(self, memory: int | None = None) -> Blocks:
        """Return the blocks of the rows: whole chunks of the dataset with the largest rows, if it can be of all."""
        sizes = [column.row_bytes for column in self.columns]
        decoded: list[set[WholeChunks]] = [set() for _ in sizes]
        for record in self.records:
            for kinds, column in zip(decoded, record.columns, strict=True):
                kinds.update(column.decoded)
        largest = self.columns[sizes.index(max(sizes))].chunk_rows
        chunk_rows = chunk_rows_of(self.row_bytes, largest, decoded)
        return Blocks.of(self.row_bytes, chunk_rows, self.offsets, decoded, memory)

    def identity(self) -> dict[str, Any]:
        """Return what identifies this set of files, with a list of the files if that fits in 64 KiB."""
        files = file_lines(self)
        text = json.dumps(files).encode()
        packed = base64.b64encode(zlib.compress(text, 9)).decode()
        return {
            "rows": self.rows,
            "files": len(self.files),
            "digest": hashlib.blake2b(text, digest_size=16).hexdigest(),
            "list": packed if len(packed) <= _MOST_IN_IDENTITY else None,
        }


def file_lines(manifest: Manifest) -> list[tuple[str, int, int]]:
    """Return name (relative to the common folder), rows and bytes of each file."""
    common = os.path.commonpath([os.path.dirname(file) for file in manifest.files])
    return [
        (os.path.relpath(file, common), record.rows, record.size)
        for file, record in zip(manifest.files, manifest.records, strict=True)
    ]


def unpacked(packed: str) -> list[tuple[str, int, int]]:
    """Return what `file_lines` returned, from the entry ``list`` of an identity."""
    return [tuple(line) for line in json.loads(zlib.decompress(base64.b64decode(packed)))]


class Manifests:
    """Builder of a manifest. It remembers the files that were described already.

    ``kept_in`` is the file that keeps the manifest between jobs, or None. ``filtered`` says that rows are left out on
    purpose, so that files without rows are expected.
    """

    def __init__(
        self,
        files: FileList,
        names: Sequence[str],
        kept_in: str | None,
        describe: Callable[[str, Sequence[str]], FileRecord],
        reader: str = "HDF5",
        filtered: bool = False,
    ):
        self._describer, self._reader, self._filtered = describe, reader, filtered
        self.files = files
        self._names = names
        self._kept_in = kept_in
        self._known: dict[int, FileRecord] = {}

    def names(self) -> str:
        """Return a short text about the names of files and manifest, without folders, which may differ by node."""
        suffix = "" if self._kept_in is None else f" with the manifest {os.path.basename(self._kept_in)!r}"
        return f"{self.files.names()}{suffix}"

    def begin(self) -> None:
        """Find the files, and describe the first one unless a manifest is kept: in a job of one process."""
        self.files.paths()
        if self._kept() is None:
            self._describe(0)

    def first(self) -> FileRecord:
        """Return the record of the first file."""
        return self._describe(0)

    def local(self) -> Manifest:
        """Return the manifest of all files, described by this process alone."""
        stored = self._kept()
        self._known |= self._described(range(len(self.files.paths())), stored)
        if stored is None:
            self._keep()
        warn_together(None, self._remarks())
        return self._joined()

    def shared(self, ranks: Topology) -> Manifest:
        """Return the manifest, described by the ranks together. Collective; a fault in a file raises on all ranks."""
        start = time.perf_counter()
        digest = hashlib.blake2b("\0".join(self.files.given_names).encode(errors="surrogateescape")).digest()
        hosts, digests = zip(*ranks.all_gather_object((socket.gethostname(), digest)), strict=True)

        def prefix(rank: int) -> str:
            return f"rank {rank} ({hosts[rank]}): " if ranks.size > 1 else ""

        def together(fn: Callable[[], Any]) -> list[Any]:
            """Return what a function returns on each rank. All ranks raise the first error, in the same words."""
            everyone = ranks.all_gather_object(self._look(fn))
            for rank, error in enumerate(everyone):
                if isinstance(error, Exception):
                    if ranks.size == 1 or len(error.args) != 1:  # errors of the system have a number and a path
                        raise error
                    # Its attributes stay: the file, and what is wrong with it.
                    error.args = (prefix(rank) + str(error),)
                    raise error.with_traceback(None) from None
            return everyone

        def on_first(fn: Callable[[], Any]) -> Any:
            return together(fn if ranks.rank == 0 else lambda: None)[0]

        if len({*digests}) == 1:
            paths, stored = on_first(lambda: (self.files.paths(), self._kept()))
            self.files.take(paths)
        else:  # the nodes may have copies of the files in different folders
            listings = together(lambda: ([*map(os.path.basename, self.files.paths())], self._kept() is None))
            for rank, (names, _) in enumerate(listings):
                if names != listings[0][0]:
                    raise ValueError(
                        f"the replicas must distribute the same files, but there are {len(names)} on rank {rank} "
                        f"({hosts[rank]}) and {len(listings[0][0])} on rank 0, or their names differ: give the same "
                        "files on all ranks, or use distribute_datasets_from_function"
                    )
            # A rank that lacks the manifest must describe its files, so all do: a file has one description.
            stored = None if any(lacks for _, lacks in listings) else self._kept()
        # Each file is opened by one rank only.
        numbers = range(ranks.rank, len(self.files.paths()), ranks.size)
        for records in together(partial(self._described, numbers, stored)):
            self._known |= records
        if stored is None and self._kept_in is not None:
            on_first(self._keep)
        warn_together(ranks, self._remarks())
        manifest = self._joined(lambda number: prefix(number % ranks.size))
        if ranks.rank == 0:
            _log.info("%d files described in %.3f s", len(self._known), time.perf_counter() - start)
        return manifest

    def _described(self, numbers: range, stored: Sequence[FileRecord] | None) -> dict[int, FileRecord]:
        """Return the records of some files: described now, or none if the stored ones are still right."""
        if stored is None:
            return {number: self._describe(number) for number in numbers}
        for number in numbers:
            self._check(number, stored)
        self._known |= enumerate(stored)
        return {}

    def _look(self, fn: Callable[[], Any]) -> Any:
        """Return the result of a function, or the error that it raises."""
        try:
            return fn()
        except (errors.DataFileError, errors.FilterUnavailableError, ValueError, OSError) as error:
            return error.with_traceback(None)
        except Exception as error:
            return errors.DataFileError(f"{self.files}: {type(error).__name__}: {error}; fix: see the error")

    def _describe(self, number: int) -> FileRecord:
        if number not in self._known:
            path = self.files.paths()[number]
            with errors.naming_damage(path):
                record = self._describer(path, self._names)
                check_limits(path, record)
            self._known[number] = record
        return self._known[number]

    def _check(self, number: int, records: Sequence[FileRecord]) -> None:
        assert self._kept_in is not None
        path, record = self.files.paths()[number], records[number]
        with errors.naming_damage(self._kept_in):
            check_limits(path, record)
        _check(self._kept_in, path, record)
        names_others = any(column.others for column in record.columns)  # the manifest could name any file
        if names_others and to_json(without_times(record)) != to_json(without_times(self._describe(number))):
            raise _stale(self._kept_in, f"file {path!r} has another description now")

    def _kept(self) -> list[FileRecord] | None:
        if self._kept_in is None:
            return None
        return _read(self._kept_in, self.files.paths(), self._names, self._reader)

    def _keep(self) -> None:
        if self._kept_in is not None:
            files = self.files.paths()
            _write(self._kept_in, files, self._names, self._reader, [self._known[i] for i in range(len(files))])

    def _remarks(self) -> list[str]:
        """Return what to warn of: rows that are left out, and files without rows beside others."""
        known = [(file, self._known[number]) for number, file in enumerate(self.files.paths())]
        empty = not self._filtered and any(record.rows for _, record in known)
        return [
            f"file {file!r}: {record.left_out}" if record.left_out else f"file {file!r} has no rows and is skipped"
            for file, record in known
            if record.left_out or (empty and not record.rows)
        ]

    def _joined(self, prefix: Callable[[int], str] = lambda number: "") -> Manifest:
        """Return the manifest of the known records, of all files. ``prefix`` names the rank that described a file."""
        files = self.files.paths()
        records = [self._known[i] for i in range(len(files))]
        with_rows = [number for number, record in enumerate(records) if record.rows]
        if not with_rows:
            raise errors.EmptyDatasetError(
                f"none of the {len(records)} files has a row in dataset {self._names[0]!r}, the first is "
                f"{files[0]!r}; fix: check the program that wrote them"
            )
        for number in with_rows:
            self._check_alike(with_rows[0], number, records, prefix)
        return Manifest.of([files[i] for i in with_rows], [records[i] for i in with_rows])

    def _check_alike(self, one: int, other: int, records: Sequence[FileRecord], prefix: Callable[[int], str]) -> None:
        for a, b in zip(records[one].columns, records[other].columns, strict=True):
            if _alike(a) != _alike(b):
                files = self.files.paths()
                raise errors.DatasetMismatchError(
                    f"{prefix(other)}dataset {a.name!r} has rows of {_rows_of(a)} in file {files[one]!r} and of "
                    f"{_rows_of(b)} in file {files[other]!r}; fix: give all rows of a dataset one type and shape"
                )


def _alike(column: Column) -> tuple[Any, ...]:
    return column.dtype, column.shape, varying(column.dtype), column.meaning


def _rows_of(column: Column) -> str:
    kind = varying(column.dtype)
    name = str(column.dtype) if kind is None else "strings" if kind is str else f"lists of {kind}"
    return f"{name} {column.shape}" + (f" ({column.meaning})" if column.meaning else "")


# --- the file that keeps it ---------------------------------------------------------------


def _write(path: str, files: Sequence[str], names: Sequence[str], reader: str, records: Sequence[FileRecord]) -> None:
    """Write the records of these files to ``path``. Their paths are stored relative to its folder."""
    folder = os.path.dirname(path)
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "datasets": list(names),
        "reader": reader,
        "files": [
            {"name": os.path.relpath(file, folder), "record": to_json(record)}
            for file, record in zip(files, records, strict=True)
        ],
    }
    try:
        with appearing(path, replace=True) as temporary:
            temporary.write_text(json.dumps(content), "utf-8")
    except OSError as error:
        message = f"{error.strerror}, so the manifest was not written"
        fix = "fix: name a folder that can be written to, or leave manifest= out"
        raise OSError(error.errno, f"{message}; {fix}", path) from error


def _read(path: str, files: Sequence[str], names: Sequence[str], reader: str) -> list[FileRecord] | None:
    """Return the records from the manifest ``path``, None if it is absent. Raise DataFileError if it is another."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        message = f"{error.strerror}, so the manifest was not read; fix: name another file, or leave manifest= out"
        raise OSError(error.errno, message, path) from error
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested too deeply
        raise errors.DataFileError(f"manifest {path!r}: it is not JSON ({error}); {_FIX}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != _VERSION:
        raise errors.DataFileError(
            f"manifest {path!r}: it is not a {_FORMAT} of version {_VERSION}; fix: give the manifest another name"
        )
    try:
        datasets, then = content["datasets"], [entry["name"] for entry in content["files"]]
        records = [from_json(entry["record"]) for entry in content["files"]]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise errors.DataFileError(f"manifest {path!r}: it is damaged ({error}); {_FIX}") from None
    if datasets != list(names):
        raise _stale(path, f"it describes the datasets {datasets}, but these are {list(names)}")
    if (then_by := content.get("reader", reader)) != reader:  # manifests of older versions name none
        raise _stale(path, f"its files were read as {then_by}, and now as {reader}")
    now = [os.path.relpath(file, os.path.dirname(path)) for file in files]
    for name in sorted(set(then) - set(now))[:1]:
        raise _stale(path, f"file {name!r} is no longer among the files")
    for name in sorted(set(now) - set(then))[:1]:
        raise _stale(path, f"file {name!r} is new")
    if now != then:
        raise _stale(path, "the files have another order")
    return records


def _check(path: str, file: str, record: FileRecord) -> None:
    """Check that a file has not changed since the manifest was written. Raise DataFileError if it has."""
    for name, size, mtime_ns in _parts(file, record):
        try:
            status = os.stat(name)
        except OSError as error:
            raise _stale(path, f"file {name!r} cannot be found ({error.strerror})") from None
        if status.st_size != size:
            raise _stale(path, f"file {name!r} had {size} bytes, and has {status.st_size} now")
        if status.st_mtime_ns != mtime_ns:
            raise _stale(path, f"file {name!r} has been written to, or copied, since then")


def _parts(file: str, record: FileRecord) -> Iterable[tuple[str, int, int]]:
    yield file, record.size, record.mtime_ns
    for column in record.columns:
        for other in column.others:
            yield joined_path(file, other.path), other.size, other.mtime_ns


def _stale(path: str, change: Any) -> errors.DataFileError:
    return errors.DataFileError(f"manifest {path!r} is stale: {change}; {_FIX}")
