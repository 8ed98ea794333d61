"""Writing of one HDF5 file by all ranks: each rank its own rows, in the order of the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpistrat.data.errors import DatasetMismatchError
from mpistrat.data.write.boxes import write_box
from mpistrat.data.write.by_all_ranks import all_or_raise, write_by_all
from mpistrat.data.write.output_file import Hdf5Output
from mpistrat.data.write.storage import Storage, put
from mpistrat.data.write.writable import NewColumn, WritableRows

if TYPE_CHECKING:
    from mpistrat.runtime.topology import Topology

_TAG = 7302


class Contribution(NamedTuple):
    """What a rank gives: its rows, and the file as it names it."""

    target: Path
    rows: WritableRows
    storage: Storage
    overwrite: bool


class _Description(NamedTuple):
    """What a rank tells the others of its part before a file is made."""

    number: int
    columns: dict[str, NewColumn]
    options: tuple[Any, ...]


def write_together(ranks: Topology, prepare: Callable[[], Contribution]) -> None:
    """Write the rows of all ranks to one file. Collective. ``prepare()`` checks arguments, and returns a rank's part.

    Raise on every rank: DatasetMismatchError if the datasets of the ranks differ in name, dtype or shape of a row,
    ValueError if the ranks give different files or options or no rank has rows, and whatever a rank raises. No file
    appears then.
    """
    part: Any = None

    def described() -> _Description:
        nonlocal part
        part = prepare()
        target, rows, storage, overwrite = part
        return _Description(rows.number, rows.columns, (target.name, storage.chunk, storage.compress, overwrite))

    everyone: list[_Description] = all_or_raise(ranks, described)
    shared = _SharedFile(part, _common(everyone), [each.number for each in everyone], ranks)
    if part.storage.in_place(shared.columns):
        make: Callable[[Path], Any] = shared.make
        write: Callable[[Path, Any], None] = shared.write_in_place
    else:
        make = _nothing
        write = shared.write_received if ranks.rank == 0 else shared.send
    write_by_all(ranks, "write_hdf5", part.target, part.overwrite, make, write)


def _nothing(temporary: Path) -> None:
    """Make nothing: rank 0 makes the file when it writes."""


def _common(parts: list[_Description]) -> dict[str, NewColumn]:
    """Return the columns of the file. Ranks without rows need only have the same names. Raise on every rank."""
    with_rows = [rank for rank, part in enumerate(parts) if part.number]
    if not with_rows:
        raise ValueError("there are no rows to write: all ranks gave arrays of length 0")
    one = with_rows[0]
    for rank, part in enumerate(parts):
        if part.options != parts[0].options:
            raise ValueError(
                f"the ranks must write one file with the same options, but rank {rank} has {part.options} and rank 0 "
                f"has {parts[0].options} (name, chunk, compress, overwrite)"
            )
        if [*part.columns] != [*parts[one].columns]:
            raise DatasetMismatchError(
                f"the ranks must write the same datasets in the same order, but rank {rank} has {[*part.columns]} and "
                f"rank {one} has {[*parts[one].columns]}"
            )
        for name, column in part.columns.items() if part.number else ():
            want = parts[one].columns[name]
            if (column.dtype, column.shape) != (want.dtype, want.shape):
                raise DatasetMismatchError(
                    f"dataset {name!r} has rows of {column.dtype} {column.shape} on rank {rank} and of {want.dtype} "
                    f"{want.shape} on rank {one}; fix: give all rows of a dataset one dtype and shape"
                )
    return parts[one].columns


class _SharedFile:
    """The file as one rank writes it: ``columns`` are those of the file, ``numbers`` the rows of each rank."""

    def __init__(self, part: Contribution, columns: dict[str, NewColumn], numbers: Sequence[int], ranks: Topology):
        self.columns, self._rows, self._storage = columns, part.rows, part.storage
        self._starts, self._ranks = [0, *accumulate(numbers)], ranks

    def _blocks(self) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        return self._storage.blocks(self._rows, self.columns, 0, self._rows.number)

    def make(self, temporary: Path) -> dict[str, int | None]:
        """Make the file with its datasets, and return where the rows of each begin. None for rows of 0 bytes."""
        with Hdf5Output(temporary) as output:
            made = output.do(partial(self._storage.create_all, self.columns, self._starts[-1]))
            return output.do(lambda file: {name: dataset.id.get_offset() for name, dataset in made.items()})

    def write_in_place(self, temporary: Path, places: Mapping[str, int | None]) -> None:
        """Write the rows of this rank where they belong in the file, without HDF5."""
        if not self._rows.number:
            return
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for start, part in self._blocks():
                for name, values in part.items():
                    place = places[name]
                    if place is not None:
                        data = np.ascontiguousarray(values, self.columns[name].dtype)
                        offset = self._starts[self._ranks.rank] + start, *[0] * (data.ndim - 1)
                        write_box(descriptor, data, offset, (self._starts[-1], *data.shape[1:]), place)
            os.fsync(descriptor)  # each node holds the pages that its own ranks wrote
        finally:
            os.close(descriptor)

    def send(self, temporary: Path, made: None) -> None:
        """Send the rows of this rank to rank 0. An error ends them, too: rank 0 waits for the end."""
        comm = self._ranks.world
        try:
            for _, part in self._blocks():
                comm.send(part, 0, _TAG)
        finally:
            comm.send(None, 0, _TAG)

    def write_received(self, temporary: Path, made: None) -> None:
        """Write the rows of all ranks: only one process at a time can write chunks with HDF5."""
        comm = self._ranks.world
        waiting = list(range(1, comm.size))
        try:
            with Hdf5Output(temporary) as output:
                datasets = output.do(partial(self._storage.create_all, self.columns, self._starts[-1]))
                for start, part in self._blocks():
                    output.do(partial(put, datasets, part, start))
                while waiting:
                    at = self._starts[waiting[0]]
                    while (part := comm.recv(source=waiting[0], tag=_TAG)) is not None:
                        output.do(partial(put, datasets, part, at))
                        at += len(next(iter(part.values())))
                    del waiting[0]
        finally:
            for rank in waiting:  # after an error, the others must not wait for this rank
                while comm.recv(source=rank, tag=_TAG) is not None:
                    pass
