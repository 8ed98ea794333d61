"""Resharding: HDF5 files into more files, or fewer, with the same rows in the same order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpistrat.data.errors import DatasetMismatchError, EmptyDatasetError, naming
from mpistrat.data.formats.hdf5 import Hdf5
from mpistrat.data.hdf5.describe import contents
from mpistrat.data.hdf5.open_file import opened
from mpistrat.data.sources.files import FileSource
from mpistrat.data.write.output_file import NewColumn, WritableRows
from mpistrat.data.write.write import Storage, check_targets, write_rows


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
    beside = _Beside(inputs, rows, single)
    write_rows(targets, _rows_of(inputs, rows), Storage(chunk, compress), False, progress, beside.write)
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
        found = contents(path)
        for name, why in found.others.items():
            raise DatasetMismatchError(
                f"file {path!r}: dataset {name!r} {why}, so the two cannot be divided together; fix: name what is "
                f"to be divided ({options})"
            )
        for one, other, has, lacks in ((found, first, path, paths[0]), (first, found, paths[0], path)):
            for name in (*one.rows, *one.single):
                if name not in other.rows and name not in other.single:
                    raise DatasetMismatchError(
                        f"file {has!r} has the dataset {name!r}, but file {lacks!r} lacks it; fix: name what is "
                        f"to be divided ({options})"
                    )
    return list(first.rows), list(first.single)


class _Beside:
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
                        f"by naming the others ({' '.join(f'--dataset {each}' for each in rows)})"
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
        found: dict[str, tuple[str, Any, str]] = {}
        with opened(path) as file:
            for name in self._single:
                with naming(f"file {path!r}, dataset {name!r}"):
                    found[name] = self._value(path, file, name)
        return found

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
                found = file[name]
                _refuse_references(paths[0], name, found)
                columns[name] = NewColumn(found.dtype, tuple(found.shape[1:]), dict(found.attrs))
    return WritableRows(rows, columns, lambda first, stop: source.read(np.arange(first, stop)))


def _refuse_references(path: str, name: str, found: h5py.Dataset) -> None:
    if h5py.check_ref_dtype(found.dtype) is not None:
        raise DatasetMismatchError(
            f"file {path!r}, dataset {name!r}: it holds references, which are not valid in another "
            "file; fix: name the other datasets with --dataset"
        )


def _common_stem(paths: Sequence[str]) -> str:
    common = os.path.commonprefix([Path(path).stem for path in paths])  # noqa: RUF071 - of names, not of paths
    return common.rstrip("-_.0123456789 ") or "data"
