"""Writing of rows to HDF5 files in bounded memory. The files appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from mpistrat.arrays.arrays import as_numpy
from mpistrat.data.dataset import Dataset
from mpistrat.data.errors import DatasetMismatchError
from mpistrat.data.rows.split import piece
from mpistrat.data.write.output_file import Hdf5Output
from mpistrat.data.write.storage import COMPRESSIONS, Storage, put
from mpistrat.data.write.together import Contribution, write_together
from mpistrat.data.write.writable import WritableRows, column_of, is_stream, named, random_access
from mpistrat.process import mpi
from mpistrat.process.atomic_file import appearing_together
from mpistrat.process.local_path import local_path


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
    >>> folder = tempfile.TemporaryDirectory()
    >>> paths = [pathlib.Path(folder.name) / f"part-{i}.h5" for i in range(2)]
    >>> write_hdf5(paths, {"x": np.arange(5), "y": np.zeros((5, 2))})
    >>> list(Dataset.from_hdf5(paths, "x").batch(5))
    [array([0, 1, 2, 3, 4])]
    >>> folder.cleanup()
    """
    targets = [local_path(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if strategy is not None:
        prepare = partial(_checked, targets, rows, chunk, compress, overwrite)
        write_together(strategy.extended.engine.all_ranks, prepare)
        return
    try:
        check_targets(targets, chunk, compress, overwrite)
        storage = Storage(chunk, compress)
        if is_stream(rows, len(targets)):
            _write_stream(targets[0], rows, storage, overwrite, progress)
        else:
            write_rows(targets, random_access(rows), storage, overwrite, progress)
    except FileExistsError as error:
        if not mpi.among_several():
            raise
        raise FileExistsError(
            f"{error}. Among several ranks, call write_hdf5() on one rank, or with strategy=strategy on all: each "
            "rank then writes its rows to one file"
        ) from None


def _checked(targets: Sequence[Path], rows: Any, chunk: Any, compress: Any, overwrite: bool) -> Contribution:
    """Return what a rank gives to a file that all ranks write. Raise if an argument is wrong."""
    if len(targets) > 1:
        raise ValueError(
            f"with strategy=, all ranks write one file, not {len(targets)}: write one, and divide it by mpistrat shard"
        )
    check_targets(targets, chunk, compress, overwrite)
    if is_stream(rows, 1):
        raise ValueError(
            "with strategy=, the number of rows must be known: give arrays, or a Dataset of known length without "
            "batch(); a Writer appends the steps of a simulation"
        )
    return Contribution(targets[0], random_access(rows), Storage(chunk, compress), overwrite)


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
        made = output.do(make)
        for start, part in blocks:
            output.do(partial(put, made, part, start - first))
            bar.update(len(next(iter(part.values()))))


def check_targets(targets: Sequence[Path], chunk: Any, compress: Any, overwrite: bool) -> None:
    """Check the arguments of `write_hdf5` that concern files."""
    if not targets:
        raise ValueError("there is no file to write to")
    if len({os.path.abspath(path) for path in targets}) < len(targets):
        raise ValueError("two of the files to write to have the same name")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, (int, np.integer)) or chunk < 1):
        raise ValueError(f"chunk must be a number of rows, at least 1, not {chunk!r}")
    if compress is not None and compress not in COMPRESSIONS:
        raise ValueError(f"compress must be one of {', '.join(COMPRESSIONS)}, not {compress!r}")
    for path in targets:
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists already: choose another name, or remove it")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path.parent} is not a folder, so {path.name} cannot be written there")


def _bar(rows: int | None, progress: bool) -> Any:
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # without a thread, which may outlive a program that was interrupted

    return Bar(total=rows, unit=" rows", unit_scale=True, disable=not progress, leave=False)


def _write_stream(target: Path, rows: Any, storage: Storage, overwrite: bool, progress: bool) -> None:
    """Write batches of rows to one file, whose datasets grow."""
    if isinstance(rows, Dataset) and rows.batch_size is None:
        rows = rows.batch(1024)
    if not isinstance(rows, Iterable):
        raise TypeError(f"rows must be a dict of arrays, an array, a Dataset or an iterable of batches, not {rows!r}")
    blocks = _blocks_of(rows)
    with appearing_together([target], overwrite) as (temporary,), _bar(None, progress) as bar:
        found = next(blocks, None)
        if found is None:
            raise ValueError(f"there are no rows to write to {target}")
        columns = {name: column_of(name, array) for name, array in found[1].items()}
        _write_file(temporary, partial(storage.create_all, columns, None), chain([found], blocks), bar)


def _blocks_of(batches: Iterable[Any]) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield batches that fit the first one: the number of the first row, and the arrays."""
    count = 0
    columns: dict[str, Any] = {}
    for batch in batches:
        arrays = {name: as_numpy(array) for name, array in named(batch).items()}
        columns = columns or {name: column_of(name, array) for name, array in arrays.items()}
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
