"""HDF5 files to more files, or to fewer, with the same rows in the same order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpistrat.data.describe_hdf5 import describe, open_file, opened
from mpistrat.data.errors import DatasetMismatchError, EmptyDatasetError
from mpistrat.data.writable import NewColumn, Rows
from mpistrat.data.write_hdf5 import Storage, check_targets, write_rows


def shard(
    inputs: Sequence[str],
    folder: str | os.PathLike[str],
    count: int,
    *,
    datasets: Sequence[str] = (),
    name: str | None = None,
    by: str = "rows",
    chunk: int | None = None,
    compress: str | None = None,
    progress: bool = False,
) -> list[Path]:
    """Divide the rows of some files over ``count`` new ones, ``NAME-00000-of-00064.h5`` and so on.

    Types and attributes are kept; how rows are stored is not.

    Returns
    -------
    list of Path
        The new files.

    Raises
    ------
    DataFileError, DatasetNotFoundError, DatasetMismatchError, EmptyDatasetError
        What is wrong with the inputs.
    FileExistsError
        If one of the new files exists.
    ValueError
        If there are fewer rows than new files.
    """
    names = list(datasets) or dataset_names(inputs[0])
    stem = name or (Path(inputs[0]).stem if len(inputs) == 1 else _common_stem(inputs))
    digits = max(5, len(str(count)))
    targets = [Path(folder) / f"{stem}-{i:0{digits}}-of-{count:0{digits}}.h5" for i in range(count)]
    Path(folder).mkdir(parents=True, exist_ok=True)
    check_targets(targets, by, chunk, compress, overwrite=False)
    files = _InputFiles(inputs, names)
    try:
        write_rows(targets, files.rows(), by, Storage(chunk, compress), False, progress, files.attributes)
    finally:
        files.close()
    return targets


def dataset_names(path: str) -> list[str]:
    """The names of all datasets of a file.

    Raises
    ------
    EmptyDatasetError
        If it has none.
    """
    found: list[str] = []
    with opened(path) as file:
        file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
    if not found:
        raise EmptyDatasetError(f"file {path!r} has no dataset at all; fix: check what wrote it")
    return found


class _InputFiles:
    """Rows of several files, of which one is open at a time."""

    def __init__(self, paths: Sequence[str], names: Sequence[str]):
        self._paths, self._names = paths, names
        records = [describe(path, names) for path in paths]
        for path, record in zip(paths, records, strict=True):
            for column, first in zip(record.columns, records[0].columns, strict=True):
                if (column.stored, column.shape) != (first.stored, first.shape):
                    raise DatasetMismatchError(
                        f"dataset {column.name!r} has rows of {first.stored} {first.shape} in file {paths[0]!r} and "
                        f"of {column.stored} {column.shape} in file {path!r}; fix: rows of one dataset must be alike"
                    )
        self._starts = np.concatenate([[0], np.cumsum([record.rows for record in records])])
        self._open: tuple[int, h5py.File] | None = None
        self.attributes: dict[str, dict[str, Any]] = {}

    def rows(self) -> Rows:
        """All of them."""
        columns = {}
        file = self._file(0)
        self.attributes["/"] = dict(file.attrs)
        for name in self._names:
            for parent in list(Path(name).parents)[:-1]:
                self.attributes[str(parent)] = dict(file[str(parent)].attrs)
            found = file[name]
            if h5py.check_ref_dtype(found.dtype) is not None:
                raise DatasetMismatchError(
                    f"file {self._paths[0]!r}, dataset {name!r}: it holds references, which mean nothing in another "
                    "file; fix: name the other datasets with --dataset"
                )
            columns[name] = NewColumn(found.dtype, tuple(found.shape[1:]), dict(found.attrs))
        return Rows(int(self._starts[-1]), columns, self._read)

    def _read(self, first: int, stop: int) -> dict[str, np.ndarray]:
        parts: list[dict[str, np.ndarray]] = []
        while first < stop:
            number = int(np.searchsorted(self._starts, first, side="right")) - 1
            start, end = int(self._starts[number]), min(int(self._starts[number + 1]), stop)
            file = self._file(number)
            parts.append({name: file[name][first - start : end - start] for name in self._names})
            first = end
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in self._names}

    def _file(self, number: int) -> h5py.File:
        if self._open is None or self._open[0] != number:
            self.close()
            self._open = number, open_file(self._paths[number])
        return self._open[1]

    def close(self) -> None:
        """Close the file that is open."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _common_stem(paths: Sequence[str]) -> str:
    stems = [Path(path).stem for path in paths]
    common = stems[0]
    while not all(stem.startswith(common) for stem in stems):
        common = common[:-1]
    return common.rstrip("-_.0123456789 ") or "data"
