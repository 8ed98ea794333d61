"""Writing of rows to HDF5 files in bounded memory, by one process or all ranks, and the division of files into others.

Files appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal, ParamSpec

import h5py
import numpy as np

from mpistrat.arrays.arrays import as_numpy
from mpistrat.data.errors import DatasetMismatchError, EmptyDatasetError, naming
from mpistrat.data.formats.hdf5 import Hdf5
from mpistrat.data.hdf5.describe import contents
from mpistrat.data.hdf5.open_file import opened
from mpistrat.data.rows.lanes import piece
from mpistrat.data.sources.files import FileSource
from mpistrat.data.write.output_file import (
    COMPRESSIONS,
    NewColumn,
    Storage,
    WritableRows,
    column_of,
    is_stream,
    named,
    put,
    random_access,
)
from mpistrat.process import mpi
from mpistrat.process.files import appearing_together, local_path
from mpistrat.representation import require
from mpistrat.runtime.topology import Topology
from mpistrat.storage.hdf5 import Hdf5Output
from mpistrat.storage.layout import write_box
from mpistrat.storage.write import write_by_all

_TAG = 7302


# The rows and options of one rank, compared before a file is made: their number, columns, and the options.
_Description = tuple[int, dict[str, NewColumn], tuple[Any, ...]]


def write_together(
    ranks: Topology, targets: Sequence[Path], source: Any, chunk: Any, compress: Any, overwrite: bool
) -> None:
    """Write the rows of all ranks to one file: ``source``, or the rows that this function returns. Collective.

    Raise on every rank: DatasetMismatchError if the datasets of the ranks differ in name, dtype or shape of a row,
    ValueError if the ranks give different files or options or no rank has rows, and whatever a rank raises. No file
    appears then.
    """
    rows: Any = None

    def described() -> _Description:
        nonlocal rows
        if len(targets) > 1:
            raise ValueError(
                f"with strategy=, all ranks write one file, not {len(targets)}: write one, and divide it by mpistrat "
                "shard"
            )
        check_targets(targets, chunk, compress, overwrite)
        if not callable(source) and is_stream(source, 1):
            raise ValueError(
                "with strategy=, the number of rows must be known: give arrays, or a Dataset of known length without "
                "batch(); a Writer appends the steps of a simulation"
            )
        rows = source() if callable(source) else random_access(source)
        return rows.number, rows.columns, (targets[0].name, chunk, compress, overwrite)

    descriptions: list[_Description] = ranks.on_all_ranks(described)
    storage = Storage(chunk, compress)
    shared = _SharedFile(rows, storage, _common(descriptions), [number for number, _, _ in descriptions], ranks)
    if storage.in_place(shared.columns):
        write_by_all(ranks, "write_hdf5", targets[0], overwrite, shared.make, shared.write_in_place)
    else:  # rank 0 makes the file when it writes
        write = shared.write_received if ranks.rank == 0 else shared.send
        write_by_all(ranks, "write_hdf5", targets[0], overwrite, lambda temporary: None, write)


def _common(parts: list[_Description]) -> dict[str, NewColumn]:
    """Return the columns of the file. Ranks without rows need only have the same names. Raise on every rank."""
    with_rows = [rank for rank, (number, _, _) in enumerate(parts) if number]
    if not with_rows:
        raise ValueError("there are no rows to write: all ranks gave arrays of length 0")
    one, (_, _, options_of_first) = with_rows[0], parts[0]
    wanted = parts[one][1]
    for rank, (number, columns, options) in enumerate(parts):
        if options != options_of_first:
            raise ValueError(
                f"the ranks must write one file with the same options, but rank {rank} has {options} and rank 0 "
                f"has {options_of_first} (name, chunk, compress, overwrite)"
            )
        if [*columns] != [*wanted]:
            raise DatasetMismatchError(
                f"the ranks must write the same datasets in the same order, but rank {rank} has {[*columns]} and "
                f"rank {one} has {[*wanted]}"
            )
        for name, column in columns.items() if number else ():
            want = wanted[name]
            if (column.dtype, column.shape) != (want.dtype, want.shape):
                raise DatasetMismatchError(
                    f"dataset {name!r} has rows of {column.dtype} {column.shape} on rank {rank} and of {want.dtype} "
                    f"{want.shape} on rank {one}; fix: give all rows of a dataset one dtype and shape"
                )
    return wanted


class _SharedFile:
    """The file as one rank writes it. ``numbers`` has the number of rows of each rank."""

    def __init__(
        self,
        rows: WritableRows,
        storage: Storage,
        columns: dict[str, NewColumn],
        numbers: Sequence[int],
        ranks: Topology,
    ):
        self.columns, self._rows, self._storage = columns, rows, storage
        self._starts, self._ranks = [0, *accumulate(numbers)], ranks

    def _blocks(self) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        return self._storage.blocks(self._rows, self.columns, 0, self._rows.number)

    def make(self, temporary: Path) -> dict[str, int | None]:
        """Make the file with its datasets, and return where the rows of each begin. None for rows of 0 bytes."""
        with Hdf5Output(temporary) as output:
            datasets = output.do(partial(self._storage.create_all, self.columns, self._starts[-1]))
            return output.do(lambda file: {name: dataset.id.get_offset() for name, dataset in datasets.items()})

    def write_in_place(self, temporary: Path, offsets: Mapping[str, int | None]) -> None:
        """Write the rows of this rank where they belong in the file, without HDF5."""
        if not self._rows.number:
            return
        with open(temporary, "r+b", 0) as file:
            for start, part in self._blocks():
                for name, values in part.items():
                    offset = offsets[name]
                    if offset is not None:
                        data = np.ascontiguousarray(values, self.columns[name].dtype)
                        index = self._starts[self._ranks.rank] + start, *[0] * (data.ndim - 1)
                        write_box(file.fileno(), data, index, (self._starts[-1], *data.shape[1:]), offset)
            os.fsync(file.fileno())  # each node holds the pages that its own ranks wrote

    def send(self, temporary: Path, made: None) -> None:
        """Send the rows of this rank to rank 0, and None at their end, also after an error: rank 0 waits for it."""
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
                    del waiting[0]  # its end has come: do not wait for it again after an error
        finally:
            for rank in waiting:  # after an error, the others must not wait for this rank
                while comm.recv(source=rank, tag=_TAG) is not None:
                    pass


_Arguments = ParamSpec("_Arguments")


def _with_order_explained(write: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Return ``write_hdf5`` with an error that explains a call by the arguments of h5py's ``create_dataset``."""

    @wraps(write)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        if len(args) > 2:
            raise TypeError("write_hdf5() takes names and arrays in a dict: write_hdf5(path, {name: array})")
        write(*args, **kwargs)

    return checked


@_with_order_explained
def write_hdf5(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    rows: Any,
    *,
    chunk: int | None = None,
    compress: Literal["gzip", "zstd"] | None = None,
    overwrite: bool = False,
    progress: bool = False,
    strategy: Any = None,
) -> None:
    """Write rows to one HDF5 file, or divide them over several files.

    Files appear only when all of them are complete and on the disk. Call it on one rank, or with ``strategy`` on all
    of its ranks. Then it is collective, and writes the rows of all ranks to one file.

    Parameters
    ----------
    paths : path or sequence of paths
        The files. Each gets consecutive rows, as many as the others or one more.
    rows : dict, array, Dataset or iterable
        A dict from the names of HDF5 datasets to arrays. A name may contain groups (``"group/x"``), and all
        arrays have the same length along axis 0. They are read a few MiB at a time, so memory maps and h5py
        datasets are never loaded whole. A single array becomes the dataset ``"x"``. A `Dataset` of such rows, or
        an iterable of batches of them, may be given too. For several files it must be a `Dataset` of known
        length that is not batched.
    chunk : int, optional
        Number of rows of a chunk. By default rows are stored contiguously. If they are compressed, or their
        number is not known beforehand, they are stored in chunks of about 1 MiB.
    compress : {"gzip", "zstd"}, optional
        The filter. HDF5's shuffle filter is applied before it. ``"zstd"`` needs the package hdf5plugin.
    overwrite : bool
        Whether existing files may be replaced.
    progress : bool
        Whether to show a progress bar. Without ``strategy`` only.
    strategy : Strategy, optional
        Every rank of the strategy gives its own rows, which may be none. The file has those of rank 0 first, then
        those of rank 1, and so on. Rows are arrays, or a `Dataset` of known length that is not batched. Rows that
        are stored contiguously are written by all ranks at once. Chunks and types of variable length are written by
        rank 0, which receives the rows a few MiB at a time. An error on one rank is raised on all.

    Raises
    ------
    FileExistsError
        If one of the files exists and ``overwrite`` is False.
    ValueError
        If there are fewer rows than files, no rows, or rows without end. With ``strategy``, if there are several files.
    TypeError
        If rows have no names, or HDF5 has no type for them, as for times.
    DatasetMismatchError
        If arrays differ in length or between ranks, or later rows differ from the first rows in shape, or their
        dtype cannot be converted safely. This is a ValueError.
    FilterUnavailableError
        If hdf5plugin is needed but not installed.
    OSError
        If the disk is full, or cannot be written for another reason. No file appears.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from mpistrat.data import Dataset
    >>> folder = tempfile.TemporaryDirectory()
    >>> paths = [pathlib.Path(folder.name) / f"part-{i}.h5" for i in range(2)]
    >>> write_hdf5(paths, {"x": np.arange(5), "y": np.zeros((5, 2))})
    >>> list(Dataset.from_hdf5(paths, "x").batch(5))
    [array([0, 1, 2, 3, 4])]
    >>> folder.cleanup()
    """
    targets = [local_path(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if strategy is not None:
        write_together(strategy.extended.engine.all_ranks, targets, rows, chunk, compress, overwrite)
        return
    try:
        check_targets(targets, chunk, compress, overwrite)
        storage = Storage(chunk, compress)
        if is_stream(rows, len(targets)):
            write_stream(targets[0], rows, storage, overwrite, progress)
        else:
            write_rows(targets, random_access(rows), storage, overwrite, progress)
    except FileExistsError as error:
        if not mpi.among_several():
            raise
        raise FileExistsError(
            f"{error}. Among several ranks, call write_hdf5() on one rank, or with strategy=strategy on all: each "
            "rank then writes its rows to one file"
        ) from None


def write_rows(
    targets: Sequence[Path],
    rows: WritableRows,
    storage: Storage,
    overwrite: bool,
    progress: bool,
    begin: Callable[[h5py.File], object] | None = None,
) -> None:
    """Write a known number of rows to files. ``begin`` is called on each new file first."""
    if rows.number < len(targets):
        raise ValueError(f"there are {rows.number} rows for {len(targets)} files: write fewer files")
    with appearing_together(targets, overwrite) as temporaries, _bar(rows.number, progress) as bar:
        for number, temporary in enumerate(temporaries):
            first, stop = piece(rows.number, len(targets), number)
            blocks = storage.blocks(rows, rows.columns, first, stop)
            make = partial(storage.create_all, rows.columns, stop - first)
            _write_file(temporary, make, blocks, bar, first, begin)


def _write_file(
    temporary: Path,
    make: Callable[[h5py.File], dict[str, h5py.Dataset]],
    blocks: Iterable[tuple[int, dict[str, np.ndarray]]],
    bar: Any,
    first: int = 0,
    begin: Callable[[h5py.File], object] | None = None,
) -> None:
    """Write blocks of rows to a new file, in which the row with the number ``first`` is the first one."""
    with Hdf5Output(temporary) as output:
        if begin is not None:
            output.do(begin)
        datasets = output.do(make)
        for start, part in blocks:
            output.do(partial(put, datasets, part, start - first))
            bar.update(len(next(iter(part.values()))))


def check_targets(targets: Sequence[Path], chunk: Any, compress: Any, overwrite: bool) -> None:
    """Check the arguments of `write_hdf5` that concern files."""
    if not targets:
        raise ValueError("there is no file to write to")
    if len({os.path.abspath(path) for path in targets}) < len(targets):
        raise ValueError("two of the files to write to have the same name")
    is_number = isinstance(chunk, (int, np.integer)) and not isinstance(chunk, bool)
    require(chunk is None or (is_number and chunk >= 1), "chunk must be a number of rows, at least 1", chunk)
    require(compress in (None, *COMPRESSIONS), f"compress must be one of {', '.join(COMPRESSIONS)}", compress)
    for path in targets:
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists already: choose another name, remove it, or set overwrite=True")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path.parent} is not a folder, so {path.name} cannot be written there")


def _bar(rows: int | None, progress: bool) -> Any:
    from mpistrat.runtime.progress import ProgressBar

    class Bar(ProgressBar):
        monitor_interval = 0  # without a thread, which may outlive a program that was interrupted

    return Bar(total=rows, unit=" rows", unit_scale=True, disable=not progress, leave=False)


def write_stream(target: Path, rows: Any, storage: Storage, overwrite: bool, progress: bool) -> None:
    """Write batches of rows to one file, whose datasets grow."""
    if hasattr(rows, "definition") and rows.batch_size is None:
        rows = rows.batch(1024)
    if not isinstance(rows, Iterable):
        raise TypeError(f"rows must be a dict of arrays, an array, a Dataset or an iterable of batches, not {rows!r}")
    columns: dict[str, NewColumn] = {}
    blocks = _blocks_of(rows, columns)
    with appearing_together([target], overwrite) as (temporary,), _bar(None, progress) as bar:
        # The first batch fills the columns, of which the datasets are made.
        first = next(blocks, None)
        if first is None:
            raise ValueError(f"there are no rows to write to {target}")
        _write_file(temporary, partial(storage.create_all, columns, None), chain([first], blocks), bar)


def _blocks_of(batches: Iterable[Any], columns: dict[str, NewColumn]) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield batches that fit the first one: the number of the first row, and the arrays. Fill the columns."""
    count = 0
    for batch in batches:
        arrays = {name: as_numpy(array) for name, array in named(batch).items()}
        columns |= {} if columns else {name: column_of(name, array) for name, array in arrays.items()}
        lengths = {name: len(array) for name, array in arrays.items()}
        if {*arrays} != {*columns} or len({*lengths.values()}) != 1:
            raise DatasetMismatchError(
                f"batches must have the datasets {sorted(columns)}, equally long, but after {count} rows there is one "
                f"with {lengths}"
            )
        for name, array in arrays.items():
            columns[name].check(name, array, count)
        yield count, arrays
        count += next(iter(lengths.values()))


def shard(
    inputs: Sequence[str],
    folder: str | os.PathLike[str],
    count: int,
    *,
    datasets: Sequence[str] = (),
    name: str | None = None,
    chunk: int | None = None,
    compress: str | None = None,
    progress: bool = False,
) -> list[Path]:
    """Divide the rows of some files over ``count`` new files, ``NAME-00000-of-00064.h5`` and so on, and return these.

    Types and attributes are kept, but chunks and compression are not. Every new file gets the datasets that hold a
    single value. These must be the same in all inputs. Raise if the inputs are wrong, a new file exists, or has no row.
    """
    rows, single = _named(inputs[0], datasets) if datasets else _alike(inputs)
    stem = name or (Path(inputs[0]).stem if len(inputs) == 1 else _common_stem(inputs))
    digits = max(5, len(str(count)))
    targets = [Path(folder) / f"{stem}-{i:0{digits}}-of-{count:0{digits}}.h5" for i in range(count)]
    Path(folder).mkdir(parents=True, exist_ok=True)
    check_targets(targets, chunk, compress, overwrite=False)
    copied = _CopiedContents(inputs, rows, single)
    write_rows(targets, _rows_of(inputs, rows), Storage(chunk, compress), False, progress, copied.write)
    return targets


def _named(path: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the named datasets that have rows, and those with a single value."""
    single = set()
    with opened(path) as file:
        for name in names:
            with contextlib.suppress(Exception):  # raised again when the file is described
                if getattr(file[name], "shape", 0) in ((), None):
                    single.add(name)
    rows = [name for name in names if name not in single]
    if not rows:
        raise EmptyDatasetError(
            f"file {path!r}: none of the datasets {', '.join(map(repr, names))} has rows to divide; fix: name "
            "one with rows"
        )
    return rows, [name for name in names if name not in rows]


def _alike(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return all datasets with rows, and all with a single value. Raise DatasetMismatchError if files differ."""
    first = contents(paths[0])
    options = " ".join(f"--dataset {name}" for name in first.rows)
    for path in paths:
        current = contents(path)
        for name, why in current.others.items():
            raise DatasetMismatchError(
                f"file {path!r}: dataset {name!r} {why}, so the two cannot be divided together; fix: name what is "
                f"to be divided ({options})"
            )
        for one, other, has, lacks in ((current, first, path, paths[0]), (first, current, paths[0], path)):
            for name in (*one.rows, *one.single):
                if name not in other.rows and name not in other.single:
                    raise DatasetMismatchError(
                        f"file {has!r} has the dataset {name!r}, but file {lacks!r} lacks it; fix: name what is "
                        f"to be divided ({options})"
                    )
    return list(first.rows), list(first.single)


class _CopiedContents:
    """The contents that every new file copies from the first input: group attributes, single-valued datasets."""

    def __init__(self, paths: Sequence[str], rows: Sequence[str], single: Sequence[str]):
        self._path, self._single = paths[0], single
        self._groups = {"/"}
        for name in (*rows, *single):
            self._groups.update(str(parent) for parent in list(Path(name).parents)[:-1])
        values = self._values(paths[0])
        for path in paths[1:]:
            for name, value in self._values(path).items():
                if value != values[name]:
                    raise DatasetMismatchError(
                        f"dataset {name!r} has the value {values[name][2]!s:.60} in file {paths[0]!r} and "
                        f"{value[2]!s:.60} in file {path!r}, so it cannot hold for all rows; fix: leave it out "
                        f"by naming the others ({' '.join(f'--dataset {column}' for column in rows)})"
                    )

    def write(self, file: h5py.File) -> None:
        """Write these contents to a new file."""
        with opened(self._path) as first:
            for group in sorted(self._groups):
                with naming(f"file {self._path!r}, group {group!r}"):
                    attributes = dict(first[group].attrs)
                file.require_group(group).attrs.update(attributes)
            for name in self._single:
                with naming(f"file {self._path!r}, dataset {name!r}"):
                    first.copy(name, file, name)

    def _values(self, path: str) -> dict[str, tuple[str, Any, str]]:
        """Return for each single-valued dataset: type, value in a comparable form, and value as text."""
        values: dict[str, tuple[str, Any, str]] = {}
        with opened(path) as file:
            for name in self._single:
                with naming(f"file {path!r}, dataset {name!r}"):
                    values[name] = self._value(path, file, name)
        return values

    def _value(self, path: str, file: h5py.File, name: str) -> tuple[str, Any, str]:
        if name not in file or file[name].shape not in ((), None):
            raise DatasetMismatchError(
                f"dataset {name!r} has a single value in file {self._path!r}, but not in file {path!r}; fix: "
                "name other datasets with --dataset"
            )
        _refuse_references(path, name, file[name])
        dtype = str(file[name].dtype)
        if file[name].shape is None:
            return dtype, None, "none"
        value = np.asarray(file[name][()])
        bits = value.tolist() if value.dtype.hasobject else value.tobytes()  # NaN is not equal to itself
        return dtype, bits, str(file[name][()])


def _rows_of(paths: Sequence[str], names: Sequence[str]) -> WritableRows:
    """Return the rows of the inputs, with types and attributes of the first one."""
    source = FileSource.open(Hdf5(), paths, {name: name for name in names})
    columns, rows = {}, len(source)
    with opened(paths[0]) as file:
        for name in names:
            with naming(f"file {paths[0]!r}, dataset {name!r}"):
                dataset = file[name]
                _refuse_references(paths[0], name, dataset)
                columns[name] = NewColumn(dataset.dtype, tuple(dataset.shape[1:]), dict(dataset.attrs))
    return WritableRows(rows, columns, lambda first, stop: source.read(np.arange(first, stop)))


def _refuse_references(path: str, name: str, dataset: h5py.Dataset) -> None:
    if h5py.check_ref_dtype(dataset.dtype) is not None:
        raise DatasetMismatchError(
            f"file {path!r}, dataset {name!r}: it holds references, which are not valid in another "
            "file; fix: name the other datasets with --dataset"
        )


def _common_stem(paths: Sequence[str]) -> str:
    common = os.path.commonprefix([Path(path).stem for path in paths])  # noqa: RUF071 - of names, not of paths
    return common.rstrip("-_.0123456789 ") or "data"
