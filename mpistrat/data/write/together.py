"""Writing of one HDF5 file by all ranks: each rank its own rows, in the order of the ranks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpistrat.data.errors import DatasetMismatchError, FilterUnavailableError
from mpistrat.data.write.output_file import hdf5_output
from mpistrat.data.write.storage import Storage, put
from mpistrat.data.write.writable import NewColumn, WritableRows
from mpistrat.process.atomic_file import publish, to_disk, write_all
from mpistrat.runtime.agreement.operation import operation

if TYPE_CHECKING:
    from mpistrat.runtime.topology import Topology

_TAG = 7302
_TOLD = (
    DatasetMismatchError,
    FilterUnavailableError,
    FileExistsError,
    FileNotFoundError,
    PermissionError,
    OSError,
    MemoryError,
    LookupError,
    ArithmeticError,
    ValueError,
    TypeError,
)
_BEGIN, _PUBLISH = operation("write_hdf5: make the file"), operation("write_hdf5: give the file its name")


class Contribution(NamedTuple):
    """What a rank gives: its rows, and the file as it names it."""

    target: Path
    rows: WritableRows
    storage: Storage
    overwrite: bool

    def described(self) -> _Description:
        """Return what the other ranks compare."""
        options = self.target.name, self.storage.chunk, self.storage.compress, self.overwrite
        return _Description(self.rows.number, self.rows.columns, options)


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
        return part.described()

    everyone: list[_Description] = _all_or_raise(ranks, described)
    target, rows, storage, overwrite = part
    columns = _common(everyone)
    starts = [0, *accumulate(each.number for each in everyone)]
    name = f".{target.name}.{secrets.token_hex(8)}.tmp"
    temporary = target.with_name(ranks.broadcast_object(name))
    first = starts[ranks.rank]
    try:
        if storage.in_place(columns):
            make = partial(_make, temporary, storage, columns, starts[-1])
            places: dict[str, int | None] = ranks.on_first(make, _BEGIN)
            write = partial(_write_in_place, temporary, places, storage, columns, rows, first)
        elif ranks.rank == 0:
            write = partial(_write_received, temporary, storage, columns, rows, starts, ranks.world)
        else:
            write = partial(_send, storage, columns, rows, ranks.world)
        _all_or_raise(ranks, write)
        ranks.on_first(partial(_finish, temporary, target, overwrite), _PUBLISH)
    finally:
        if ranks.rank == 0:
            temporary.unlink(missing_ok=True)


def _all_or_raise(ranks: Topology, fn: Callable[[], Any]) -> list[Any]:
    """Return the results of a function on all ranks, or raise on every rank if it raised on one. Collective."""
    mine: Any = None
    failure: Exception | None = None
    try:
        mine = fn()
    except Exception as error:
        failure = error
    told = None if failure is None else (_known(failure), str(failure))
    everyone = ranks.all_gather_object((mine, told))
    if failure is not None:
        raise failure
    for rank, (_, reported) in enumerate(everyone):
        if reported is not None:
            kind, text = reported
            raise kind(f"rank {rank}: {text}")
    return [result for result, _ in everyone]


def _known(error: Exception) -> type[Exception]:
    """Return the class of an error, or of its nearest base, that takes a text and that other ranks can load."""
    return next((kind for kind in type(error).__mro__ if kind in _TOLD), RuntimeError)


def _common(parts: list[_Description]) -> dict[str, NewColumn]:
    """Return the columns of the file. Ranks without rows need only have the same names.

    Raise DatasetMismatchError or ValueError: on every rank, if the parts do not fit together.
    """
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


def _make(
    temporary: Path, storage: Storage, columns: Mapping[str, NewColumn], rows: int
) -> dict[str, int | None]:
    """Make the file with its datasets, and return where the rows of each begin. None for rows of 0 bytes."""
    with hdf5_output(temporary) as output:
        made = output.do(partial(storage.create_all, columns, rows))
        return output.do(lambda file: {name: dataset.id.get_offset() for name, dataset in made.items()})


def _write_in_place(
    temporary: Path,
    places: Mapping[str, int | None],
    storage: Storage,
    columns: Mapping[str, NewColumn],
    rows: WritableRows,
    first: int,
) -> None:
    """Write the rows of this rank where they belong in the file, without HDF5."""
    if not rows.number:
        return
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for start, part in storage.blocks(rows, columns, 0, rows.number):
            for name, values in part.items():
                place = places[name]
                if place is not None:
                    data = np.ascontiguousarray(values, columns[name].dtype)
                    row_bytes = data.nbytes // len(data)
                    bits = data.reshape(-1).view(np.uint8).data
                    write_all(descriptor, bits, place + (first + start) * row_bytes)
        os.fsync(descriptor)  # each node holds the pages that its own ranks wrote
    finally:
        os.close(descriptor)


def _send(storage: Storage, columns: Mapping[str, NewColumn], rows: WritableRows, comm: Any) -> None:
    """Send the rows of this rank to rank 0. An error ends them, too: rank 0 waits for the end."""
    try:
        for _, part in storage.blocks(rows, columns, 0, rows.number):
            comm.send(part, 0, _TAG)
    finally:
        comm.send(None, 0, _TAG)


def _write_received(
    temporary: Path,
    storage: Storage,
    columns: Mapping[str, NewColumn],
    rows: WritableRows,
    starts: list[int],
    comm: Any,
) -> None:
    """Write the rows of all ranks: only one process at a time can write chunks with HDF5."""
    waiting = list(range(1, comm.size))
    try:
        with hdf5_output(temporary) as output:
            made = output.do(partial(storage.create_all, columns, starts[-1]))
            for start, part in storage.blocks(rows, columns, 0, rows.number):
                output.do(partial(put, made, part, start))
            while waiting:
                at = starts[waiting[0]]
                while (part := comm.recv(source=waiting[0], tag=_TAG)) is not None:
                    output.do(partial(put, made, part, at))
                    at += len(next(iter(part.values())))
                del waiting[0]
    finally:
        for rank in waiting:  # after an error, the others must not wait for this rank
            while comm.recv(source=rank, tag=_TAG) is not None:
                pass


def _finish(temporary: Path, target: Path, overwrite: bool) -> None:
    to_disk(temporary)
    publish(temporary, target, overwrite)
    to_disk(target.parent)
