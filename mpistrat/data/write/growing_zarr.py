"""A Zarr group (version 2 of the format) whose arrays grow by steps: each rank writes the files of its chunks.

The files of new chunks are complete before the shape in ``.zarray``, which is replaced as a whole, makes them a part of
the array. If several arrays grow, a file with all their shapes comes first: a writer that was killed between two arrays
left one with more steps, and the next one would go on with arrays that are out of step (1 of 350 kills). It finishes
that commit instead. No library is needed: a chunk is a file of its bytes.
"""

from __future__ import annotations

import gzip
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.data.errors import DataFileError, naming_damage
from mpistrat.data.formats.contract import needed
from mpistrat.data.write.growing_hdf5 import StepSeries, not_of_writer
from mpistrat.data.write.shared_file import write_box
from mpistrat.process.files import replace_text, to_disk

_GROUP = {"zarr_format": 2}
_COMPRESSORS: dict[str | None, Any] = {
    None: None,
    "gzip": {"id": "gzip", "level": 4},
    "zstd": {"id": "zstd", "level": 3},
}


class GrowingZarr:
    """The store as one rank has it open. It has the methods of `GrowingHdf5`."""

    whole_steps = False

    def __init__(self, path: Path, compress: str | None):
        self._path, self._compressor = path, _COMPRESSORS[compress]
        self._encode: Callable[[Any], Any] = partial(gzip.compress, compresslevel=4, mtime=0)
        if compress == "zstd":
            self._encode = needed("numcodecs", "Zarr stores with compress='zstd'").Zstd(3).encode
        self.guard, self.end = path / ".zgroup", 0
        self._begun = path / ".commit"  # the shapes of a commit of several arrays, until all have them
        self._unsynced: set[Path] = set()

    def make(self, replace: bool) -> None:
        """Make a group without arrays. Raise FileExistsError if there is one, unless it may be replaced."""
        if self._path.exists() and not (replace and self.guard.exists()):
            raise FileExistsError(f"{self._path} exists already: choose another name, or remove it")
        new, old = (self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.tmp") for _ in range(2))
        new.mkdir()
        _write_json(new / ".zgroup", _GROUP)
        if self._path.exists():
            self._path.rename(old)
        new.rename(self._path)
        to_disk(self._path.parent)
        shutil.rmtree(old, ignore_errors=True)

    def attach(self) -> int:
        """Raise an error if this rank does not see the store."""
        to_disk(self._path)
        return 0

    def close(self) -> None:
        """Do nothing: it keeps no file open."""

    def found(self) -> tuple[list[StepSeries], dict[str, Any]]:
        """Return the arrays and the attributes of the store. Raise DataFileError if no such writer has made it."""
        series: list[StepSeries] = []
        others: list[Any] = [] if self.guard.exists() else [".zgroup"]
        begun, inside = _read_json(self._begun), self._path.resolve()
        if any(inside not in (self._path / name).resolve().parents for name in begun):
            raise DataFileError.of_file(str(self._begun), "it names what is not in the store; fix: remove this file")
        self._finish(begun)
        for folder, _, files in os.walk(self._path):
            name = os.path.relpath(folder, self._path)
            if ".zarray" in files:
                with naming_damage(os.path.join(folder, ".zarray")):
                    about = _read_json(Path(folder, ".zarray"))
                    one = StepSeries(name, np.dtype(about["dtype"]), tuple(about["shape"][1:]), tuple(about["chunks"]))
                    one.steps = one.committed = about["shape"][0]
                    one.compressed = about["compressor"] is not None
                    is_own, there = one.steps >= 0 and self._about(one) == about, {*files}
                    rows = range(-(-one.steps // one.chunk[0]) if is_own else 0)
                    chunks = (_chunk_name(one, row, cell) for row in rows for cell in range(one.cells))
                    lost = next((each for each in chunks if each not in there), None)
                if lost is not None:
                    what = f"it lacks the file of chunk {lost}; fix: bring it back, or write another store"
                    raise DataFileError.of_file(folder, what)
                one.attributes.update(_read_json(Path(folder, ".zattrs")))
                (series if is_own else others).append(one)
        if others:
            raise DataFileError.of_file(str(self._path), not_of_writer([*map(str, others)]))
        return series, _read_json(self._path / ".zattrs")

    def check(self, attributes: Mapping[str, Any]) -> None:
        """Raise an error if JSON cannot store these attributes."""
        _json(dict(attributes))

    def create(self, series: StepSeries) -> None:
        """Make the folder of a new array. Raise TypeError if Zarr has no such type."""
        if series.dtype.kind not in "biufc":
            raise TypeError(f"{series.name!r}: {series.dtype} is not written to Zarr; fix: write numbers, or to HDF5")
        folder = self._path / series.name
        folder.mkdir(parents=True, exist_ok=True)
        while (folder := folder.parent) != self._path:
            _write_json(folder / ".zgroup", _GROUP)

    def put(self, series: StepSeries, values: np.ndarray, rank: int) -> None:
        """Write this rank's block of the next step to the files of its chunks. Raise OSError if that fails."""
        row, slot = divmod(series.steps, series.chunk[0])
        for cell, box, here in series.parts(rank):
            with open(self._file(series, row, cell), "r+b", 0, opener=_made_if_absent) as file:
                file.truncate(series.chunk_bytes)
                place = slot * series.chunk_bytes // series.chunk[0]
                write_box(file.fileno(), values[here], box.offset, series.chunk[1:], place)

    def store(self, series: StepSeries, chunks: Mapping[int, np.ndarray], ranks: Any) -> None:
        """Compress the chunks that this rank has of the next step, and write them. Raise OSError if that fails."""
        for cell, chunk in chunks.items():
            self._file(series, series.steps, cell).write_bytes(self._encode(chunk))

    def _file(self, series: StepSeries, row: int, cell: int) -> Path:
        path = self._path / series.name / _chunk_name(series, row, cell)
        self._unsynced |= {path, path.parent}
        return path

    def sync(self) -> None:
        """Bring what this rank has written to the disk. Raise OSError if that fails."""
        while self._unsynced:
            to_disk(self._unsynced.pop())

    def commit(self, series: Mapping[str, StepSeries], attributes: Mapping[str, Any]) -> int:
        """Make all steps part of the arrays: their chunks are on the disk already."""
        if attributes:
            _write_json(self._path / ".zattrs", attributes)
        new = {name: each for name, each in series.items() if each.committed < each.steps}
        for name, each in new.items():
            if each.attributes:
                _write_json(self._path / name / ".zattrs", each.attributes)
        shapes = {name: self._about(each) for name, each in new.items()}
        if len(shapes) > 1:
            _write_json(self._begun, shapes)
        self._finish(shapes)
        return 0

    def _finish(self, shapes: Mapping[str, Any]) -> None:
        """Give arrays their new shapes, all of them in the end."""
        for name, about in shapes.items():
            _write_json(self._path / name / ".zarray", about)
        self._begun.unlink(missing_ok=True)

    def _about(self, series: StepSeries) -> dict[str, Any]:
        return {
            "zarr_format": 2,
            "shape": [series.steps, *series.shape],
            "chunks": [*series.chunk],
            "dtype": series.dtype.str,
            "compressor": self._compressor if series.compressed else None,
            "fill_value": None,
            "order": "C",
            "filters": None,
        }


def _chunk_name(series: StepSeries, row: int, cell: int) -> str:
    return ".".join(map(str, (row, *(np.unravel_index(cell, series.grid) if series.grid else ()))))


def _made_if_absent(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o666)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=lambda each: each.tolist())


def _write_json(path: Path, value: Any) -> None:
    replace_text(path, _json(value))


def _read_json(path: Path) -> dict[str, Any]:
    with naming_damage(str(path)):
        return dict(json.loads(path.read_text())) if path.exists() else {}
