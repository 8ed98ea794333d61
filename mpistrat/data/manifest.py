"""The files of a dataset, described: each once, by one rank for all."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from mpistrat.data.contracts import Peers
from mpistrat.data.errors import (
    DataFileError,
    DatasetMismatchError,
    EmptyDatasetError,
    FilterUnavailableError,
)

if TYPE_CHECKING:
    from mpistrat.data.describe_hdf5 import FileRecord


class Manifest(NamedTuple):
    """The files that have rows.

    ``offsets[i]`` is the number of the first row of ``files[i]``; the last entry is the number of rows.
    """

    files: tuple[str, ...]
    records: tuple[FileRecord, ...]
    offsets: np.ndarray

    @classmethod
    def of(cls, files: Sequence[str], records: Sequence[FileRecord]) -> Manifest:
        """The manifest of these files."""
        rows = [record.rows for record in records]
        return cls(tuple(files), tuple(records), np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]))


class Manifests:
    """Builds a manifest, remembering which files were described already."""

    def __init__(self, files: Sequence[str], names: Sequence[str]):
        self._files = files
        self._names = names
        self._known: dict[int, FileRecord] = {}

    def first(self) -> FileRecord:
        """The record of the first file, errors raised here."""
        return self._describe(0)

    def local(self) -> Manifest:
        """All files described by this process."""
        records = [self._describe(number) for number in range(len(self._files))]
        return self._joined(records, warn=True)

    def shared(self, peers: Peers) -> Manifest:
        """The files described by the peers in turn. Collective; a fault of a file is raised by all."""
        found: dict[int, FileRecord | Exception] = {}
        for number in range(peers.rank, len(self._files), peers.size):
            try:
                found[number] = self._describe(number)
            except (DataFileError, FilterUnavailableError, ValueError) as error:
                found[number] = error.with_traceback(None)
                break
            except Exception as error:
                found[number] = DataFileError(
                    f"file {self._files[number]!r}: {type(error).__name__}: {error}; fix: see the error"
                )
                break
        everyone = peers.all_gather_object((socket.gethostname(), found))
        failed: tuple[int, int] | None = None
        for rank, (_, theirs) in enumerate(everyone):
            for number, record in theirs.items():
                if not isinstance(record, Exception):
                    self._known[number] = record
                elif failed is None or number < failed[0]:
                    failed = number, rank
        if failed is not None:
            number, rank = failed
            host, theirs = everyone[rank]
            _raise(theirs[number], f"rank {rank} ({host}): " if peers.size > 1 else "")
        return self._joined([self._known[i] for i in range(len(self._files))], warn=peers.rank == 0)

    def _describe(self, number: int) -> FileRecord:
        from mpistrat.data.describe_hdf5 import describe

        if number not in self._known:
            self._known[number] = describe(self._files[number], self._names)
        return self._known[number]

    def _joined(self, records: Sequence[FileRecord], warn: bool) -> Manifest:
        kept = [number for number, record in enumerate(records) if record.rows]
        if not kept:
            raise EmptyDatasetError(
                f"none of the {len(records)} files has a row, the first is {self._files[0]!r}; "
                "fix: check what wrote them"
            )
        if warn:
            for number, record in enumerate(records):
                if not record.rows:
                    warnings.warn(
                        f"file {self._files[number]!r} has no rows and is skipped", UserWarning, stacklevel=2
                    )
        for number in kept:
            self._check_alike(kept[0], number, records)
        return Manifest.of([self._files[i] for i in kept], [records[i] for i in kept])

    def _check_alike(self, one: int, other: int, records: Sequence[FileRecord]) -> None:
        for a, b in zip(records[one].columns, records[other].columns, strict=True):
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                raise DatasetMismatchError(
                    f"dataset {a.name!r} has rows of {a.dtype} {a.shape} in file {self._files[one]!r} and of "
                    f"{b.dtype} {b.shape} in file {self._files[other]!r}; "
                    "fix: rows of one dataset must be alike"
                )


def _raise(error: Exception, where: str) -> NoReturn:
    if not where or len(error.args) != 1:
        raise error
    raise type(error)(where + str(error)) from None
