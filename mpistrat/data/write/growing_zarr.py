"""Zarr groups that grow by steps, and are whole on the disk after each commit."""

from __future__ import annotations

import gzip
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mpistrat.data.errors import DataFileError, naming_damage
from mpistrat.data.formats.contract import needed
from mpistrat.data.write.growing import GrowingFile, StepSeries, not_of_writer
from mpistrat.process.files import appearing, replace_text, to_disk
from mpistrat.storage.layout import write_box

_COMPRESSORS: dict[str | None, Any] = {
    None: None,
    "gzip": {"id": "gzip", "level": 4},
    "zstd": {"id": "zstd", "level": 3},
}


class GrowingZarr(GrowingFile):
    """A Zarr group (version 2 of the format) as one rank has it open. It has the methods of `GrowingHdf5`.

    Each rank writes the files of its chunks. The files of new chunks are complete before the shape in ``.zarray``,
    which is replaced as a whole, makes them a part of the array. If several arrays grow, a file with all their shapes
    comes first: a writer that was killed between two arrays left one with more steps, and the next one would go on with
    arrays that are out of step (1 of 350 kills). It finishes that commit instead. No library is needed: a chunk is a
    file of its bytes.
    """

    _group: ClassVar[dict[str, Any]] = {"zarr_format": 2}
    _array_file = ".zarray"

    def __init__(self, path: Path, compress: str | None):
        self._path, self._compressor = path, _COMPRESSORS[compress]
        # mtime=0: the same chunk has the same bytes at any time.
        self._encode: Callable[[Any], Any] = partial(gzip.compress, compresslevel=4, mtime=0)
        if compress == "zstd":
            self._encode = needed("numcodecs", "Zarr stores with compress='zstd'").Zstd(3).encode
        self.guards = path / ".zgroup", path / "zarr.json"  # one of each version: a store may replace one of the other
        self.guard, self.end = self.guards[0], 0
        self._pending = path / ".commit"  # the shapes of a commit of several arrays, until all have them
        self._unsynced: set[Path] = set()

    def make(self, replace: bool) -> None:
        """Make a group without arrays. Raise FileExistsError unless it may replace what is there, a group."""
        if self._path.exists() and not (
            replace and (self.guards[0].exists() or _read_json(self.guards[1]).get("node_type") == "group")
        ):
            how = "or remove it" if replace else "remove it, or set overwrite=True"
            raise FileExistsError(f"{self._path} exists already: choose another name, {how}")
        new, old = (self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.tmp") for _ in range(2))
        new.mkdir()
        _write_json(new / self.guard.name, self._group)
        if self._path.exists():
            self._path.rename(old)  # a rename does not replace a folder that has files
        new.rename(self._path)
        to_disk(self._path.parent)
        shutil.rmtree(old, ignore_errors=True)

    def attach(self) -> int:
        """Raise an error if this rank does not see the store."""
        to_disk(self._path)
        return 0

    def existing(self) -> tuple[list[StepSeries], dict[str, Any]]:
        """Return the arrays and the attributes of the store. Raise DataFileError if no such writer has made it."""
        series: list[StepSeries] = []
        others: list[Any] = [] if self.guard.exists() else [self.guard.name]
        shapes, inside = _read_json(self._pending), self._path.resolve()
        # `_finish` writes to these names, which anybody may have put there.
        if any(inside not in (self._path / name).resolve().parents for name in shapes):
            raise DataFileError.of_file(str(self._pending), "it names what is not in the store; fix: remove this file")
        self._finish(shapes)
        for folder, _, files in os.walk(self._path):
            if self._array_file in files:
                path, names = Path(folder, self._array_file), {*files}
                with naming_damage(str(path)):
                    metadata = _read_json(path)
                    if metadata.get("node_type") == "group":
                        continue
                    item = self._series(os.path.relpath(folder, self._path), metadata)
                    steps = self._steps_of_file(item)
                    is_own = item.steps >= 0 and steps % item.chunk[0] == 0 and self._metadata_of(item) == metadata
                    rows = range(-(-item.steps // steps) if is_own else 0)
                    chunks = (self._file_name(item, row, cell) for row in rows for cell in range(item.cells))
                    # zarr reads an empty shard as zeros. Other empty chunks are errors of all readers.
                    lost = next(
                        (c for c in chunks if c not in names or (self.shards and not Path(folder, c).stat().st_size)),
                        None,
                    )
                if lost is not None:
                    message = f"it lacks the file of chunk {lost}; fix: bring it back if gone or empty, or write anew"
                    raise DataFileError.of_file(folder, message)
                (series if is_own else others).append(item)
        if others:
            raise DataFileError.of_file(str(self._path), not_of_writer([*map(str, others)]))
        return series, self._attributes(self._path)

    def _series(self, name: str, metadata: Mapping[str, Any]) -> StepSeries:
        """Return an array of the store by its metadata."""
        series = StepSeries(name, np.dtype(metadata["dtype"]), tuple(metadata["shape"][1:]), tuple(metadata["chunks"]))
        series.steps = series.committed = metadata["shape"][0]
        series.compressed = metadata["compressor"] is not None
        series.attributes.update(self._attributes(self._path / name))
        return series

    @staticmethod
    def _attributes(folder: Path) -> dict[str, Any]:
        return _read_json(folder / ".zattrs")

    def check(self, attributes: Mapping[str, Any]) -> None:
        """Raise an error if JSON cannot store these attributes."""
        _json(dict(attributes))

    def create(self, series: StepSeries) -> None:
        """Make the folder of a new array. Raise TypeError or ValueError if Zarr has no such type or name."""
        if "zarr.json" in series.name.split("/"):
            raise ValueError(f"{series.name!r}: Zarr gives the name 'zarr.json' to metadata; fix: choose another name")
        if series.dtype.kind not in "biufc":
            raise TypeError(f"{series.name!r}: {series.dtype} is not written to Zarr; fix: write numbers, or to HDF5")
        folder = self._path / series.name
        folder.mkdir(parents=True, exist_ok=True)
        while (folder := folder.parent) != self._path:
            _write_json(folder / self.guard.name, self._group)  # every folder above an array is a group

    def put(self, series: StepSeries, values: np.ndarray, rank: int) -> None:
        """Write this rank's block of the next step to the files of its chunks. Raise OSError if that fails."""
        row, slot = divmod(series.steps, series.chunk[0])
        for cell, box, here in series.parts(rank):
            with open(self._file(series, row, cell), "r+b", 0, opener=_open_or_create) as file:
                # Ranks whose blocks share a chunk come in any order: the first one makes the file in its full length.
                file.truncate(series.chunk_bytes)
                start = slot * series.chunk_bytes // series.chunk[0]
                write_box(file.fileno(), values[here], box.offset, series.chunk[1:], start)

    def store(self, series: StepSeries, chunks: Mapping[int, np.ndarray], ranks: Any) -> None:
        """Compress the chunks that this rank has of the next step, and write them. Raise OSError if that fails."""
        for cell, chunk in chunks.items():
            self._file(series, series.steps, cell).write_bytes(self._encode(chunk))

    def _file(self, series: StepSeries, row: int, cell: int) -> Path:
        path = self._path / series.name / self._file_name(series, row, cell)
        self._unsynced |= {path, path.parent}  # a new file is on the disk when its folder is, too
        return path

    def sync(self) -> None:
        """Bring what this rank has written to the disk. Raise OSError if that fails."""
        while self._unsynced:
            to_disk(self._unsynced.pop())

    def commit(self, all_series: Mapping[str, StepSeries], attributes: Mapping[str, Any]) -> int:
        """Make all steps part of the arrays: their chunks are on the disk already."""
        new = {name: series for name, series in all_series.items() if series.committed < series.steps}
        self._write_attributes({"": attributes, **{name: series.attributes for name, series in new.items()}})
        shapes = {name: self._metadata_of(series) for name, series in new.items()}
        if len(shapes) > 1:
            _write_json(self._pending, shapes)
        self._finish(shapes)
        return 0

    def _write_attributes(self, attributes: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the attributes of the group and of arrays, by their names."""
        for name, values in attributes.items():
            if values:
                _write_json(self._path / name / ".zattrs", values)

    def _finish(self, shapes: Mapping[str, Any]) -> None:
        """Give arrays their new shapes, all of them in the end."""
        for name, metadata in shapes.items():
            _write_json(self._path / name / self._array_file, metadata)
        self._pending.unlink(missing_ok=True)

    def _metadata_of(self, series: StepSeries) -> dict[str, Any]:
        return {
            "zarr_format": 2,
            "shape": [series.steps, *series.shape],
            "chunks": [*series.chunk],
            "dtype": series.dtype.str,
            "compressor": self._compressor if series.compressed else None,
            "fill_value": None,  # all chunks are in files
            "order": "C",
            "filters": None,
        }

    def _steps_of_file(self, series: StepSeries) -> int:
        """Return how many steps the files of an array have."""
        return series.chunk[0]

    def _file_name(self, series: StepSeries, row: int, cell: int) -> str:
        return ".".join(map(str, (row, *(np.unravel_index(cell, series.grid) if series.grid else ()))))


class GrowingZarr3(GrowingZarr):
    """A Zarr group of version 3, which zarr encodes. A file is a shard of several chunks along the axis of the steps.

    A shard has one owner, the rank that `store` gives its chunks to: where several processes write chunks of one shard
    by zarr, each replaces the shard, and chunks are lost. The owner keeps the shard in memory until it is complete, and
    replaces its file as a whole, also at a flush: so the steps of earlier flushes stay, whatever happens.
    """

    encodes = True
    _group: ClassVar[dict[str, Any]] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    _array_file = "zarr.json"

    def __init__(self, path: Path, compress: str | None, shards: int | None):
        super().__init__(path, None)
        self._zarr = zarr = needed("zarr", "Zarr stores of version 3")
        if not hasattr(zarr, "create_array"):
            raise ImportError(
                f"zarr {zarr.__version__} writes version 2 only; fix: pip install 'zarr>=3', or leave out 3"
            )
        self.guard, self.shards = self.guards[1], shards
        codecs = {"gzip": partial(zarr.codecs.GzipCodec, level=4), "zstd": partial(zarr.codecs.ZstdCodec, level=3)}
        self._codec = None if compress is None else codecs[compress]()
        self._filling: dict[tuple[str, int], tuple[StepSeries, int, np.ndarray]] = {}
        self._changed: set[tuple[str, int]] = set()

    def update_guard(self, attributes: Mapping[str, Any]) -> bool:
        changed = _json(self._attributes(self._path)) != _json(attributes)  # it may have arrays
        if changed:
            _write_json(self.guard, {**self._group, "attributes": attributes})
        return changed

    def create(self, series: StepSeries) -> None:
        try:
            self._metadata_of(series)
        except (KeyError, TypeError, ValueError) as error:
            message = f"{series.name!r}: zarr does not take {series.dtype} ({error}); fix: write float64 or complex128"
            raise TypeError(message) from error
        super().create(series)

    def store(self, series: StepSeries, chunks: Mapping[int, np.ndarray], ranks: Any) -> None:
        """Take the chunks that this rank has of the next step. Write shards that are complete."""
        steps = self._steps_of_file(series)
        row, slot = divmod(series.steps, steps)
        for cell, chunk in chunks.items():
            key = series.name, cell
            if key not in self._filling or self._filling[key][1] != row:
                self._filling[key] = series, row, self._partial_shard(series, row, cell, slot)
            self._filling[key][2][slot] = chunk[0]
            self._changed.add(key)
            if slot + 1 == steps:
                self._write(key, steps)

    def sync(self) -> None:
        for key in [*self._changed]:
            series, row, _ = self._filling[key]
            self._write(key, series.steps - row * self._steps_of_file(series))

    def _partial_shard(self, series: StepSeries, row: int, cell: int, slot: int) -> np.ndarray:
        """Return a shard with the steps that an earlier writer has put in it."""
        steps = self._steps_of_file(series)
        shard = np.zeros((steps, *series.chunk[1:]), series.dtype)
        if slot:
            at = np.unravel_index(cell, series.grid) if series.grid else ()
            parts = (slice(i * size, (i + 1) * size) for i, size in zip(at, series.chunk[1:], strict=True))
            here = slice(row * steps, row * steps + slot), *parts
            old = self._zarr.open_array(self._path / series.name, mode="r")[here]
            shard[tuple(map(slice, old.shape))] = old
        return shard

    def _write(self, key: tuple[str, int], steps: int) -> None:
        """Replace the file of a shard by one that has its first steps. Later chunks are left out."""
        series, row, shard = self._filling[key]
        files, array = self._shard(series)
        array[:steps] = shard[:steps]
        (data,) = (file for file_name, file in files.items() if file_name != self._array_file)
        with appearing(self._path / series.name / self._file_name(series, row, key[1]), replace=True) as temporary:
            temporary.write_bytes(data.to_bytes())
        self._changed.discard(key)

    def _shard(self, series: StepSeries) -> tuple[dict[str, Any], Any]:
        """Return the files of an array in memory that has one shard, and the array."""
        files: dict[str, Any] = {}
        shape = self._steps_of_file(series), *series.chunk[1:]
        array = self._zarr.create_array(
            self._zarr.storage.MemoryStore(files),
            shape=shape,
            chunks=series.chunk,
            shards=shape if self.shards else None,
            dtype=series.dtype.newbyteorder("="),
            compressors=self._codec,
            fill_value=0,
            chunk_key_encoding={"name": "default", "separator": "."},
            config={"write_empty_chunks": True},  # a chunk of zeros has a file, too
        )
        return files, array

    def _series(self, name: str, metadata: Mapping[str, Any]) -> StepSeries:
        codec = metadata["codecs"][0]
        grid = codec if codec["name"] == "sharding_indexed" else metadata["chunk_grid"]
        chunk, dtype = tuple(grid["configuration"]["chunk_shape"]), np.dtype(metadata["data_type"])
        series = StepSeries(name, dtype, tuple(metadata["shape"][1:]), chunk)
        series.steps = series.committed = metadata["shape"][0]
        series.compressed = True
        series.attributes.update(metadata["attributes"])
        return series

    @staticmethod
    def _attributes(folder: Path) -> dict[str, Any]:
        return dict(_read_json(folder / "zarr.json").get("attributes", {}))

    def _write_attributes(self, attributes: Mapping[str, Mapping[str, Any]]) -> None:
        """Do nothing: the metadata of an array has its attributes."""

    def _metadata_of(self, series: StepSeries) -> dict[str, Any]:
        metadata = json.loads(self._shard(series)[0][self._array_file].to_bytes())
        return {**metadata, "shape": [series.steps, *series.shape], "attributes": series.attributes}

    def _steps_of_file(self, series: StepSeries) -> int:
        return self.shards or series.chunk[0]

    def _file_name(self, series: StepSeries, row: int, cell: int) -> str:
        return f"c.{super()._file_name(series, row, cell)}"


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o666)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=lambda array: array.tolist())


def _write_json(path: Path, value: Any) -> None:
    replace_text(path, _json(value))


def _read_json(path: Path) -> dict[str, Any]:
    with naming_damage(str(path)):
        return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}
