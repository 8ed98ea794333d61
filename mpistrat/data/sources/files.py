"""Source of rows of files."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nest
from mpistrat.data.errors import DataFileError, NotFiniteError
from mpistrat.data.formats.contract import Format
from mpistrat.data.hdf5.manifest import FileList, Manifest, Manifests
from mpistrat.data.rows.blocks import LEAST_WINDOW_BYTES, MOST_DECODED, OF_MEMORY, Blocks, decoded_bytes
from mpistrat.data.rows.contracts import IN_MEMORY_AT_ONCE, Source
from mpistrat.data.rows.lanes import MOST_LANES
from mpistrat.data.rows.spec import ArraySpec
from mpistrat.data.sources.rows_in_memory import RowsInMemory, made_by_node
from mpistrat.memory.buffer_pool import Buffers
from mpistrat.memory.made_once import MadeOnce
from mpistrat.process import mpi

if TYPE_CHECKING:
    from mpistrat.runtime.topology import Topology

_AT_ONCE_BYTES = 4 << 20
_OBJECTS_AT_ONCE = 4096  # rows of unknown size
_SMALL_ROW = 16 << 10
_LEAST_SHARE = 1 / 8  # of all rows: a shuffle that uses fewer does not keep them
_MOST_READ_BY_STEP = 256  # files
_NOT_KEPT = "%s is not kept in memory, which makes reading slower: %s"
_log = logging.getLogger("mpistrat.data")


def first_not_finite(values: np.ndarray) -> tuple[int, object] | None:
    """Return the first row that holds NaN or infinity, and that value, or None. Fields are searched too."""
    if not len(values):
        return None
    if values.dtype.names:
        firsts = [first_not_finite(values[name]) for name in values.dtype.names]
        return min((first for first in firsts if first), key=lambda first: first[0], default=None)
    if values.dtype.hasobject:
        return _first_of_objects(values)
    if values.dtype.kind not in "fc":
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.add.reduce(values, axis=None)):  # fast path: takes a quarter of the time
            return None
    wrong = ~np.isfinite(values)
    if not wrong.any():  # all values are finite, only their sum overflowed
        return None
    at = np.unravel_index(int(wrong.argmax()), values.shape)
    return int(at[0]), values[at].item()


def _first_of_objects(values: np.ndarray) -> tuple[int, object] | None:
    per_row = math.prod(values.shape[1:])
    for number, value in enumerate(values.flat):
        if isinstance(value, np.ndarray) and (first := first_not_finite(value.reshape(-1))):
            return number // per_row, first[1]
    return None


class FileSource(Source):
    """The rows of files of one format, one file after another. The manifest is built when it is first needed."""

    _built: Manifest | None = None
    _identified: tuple[Manifest, dict[str, Any]] | None = None
    _blocks: Blocks | None = None
    _shuffle_bytes: int | None = None  # memory for the windows of a shuffle
    _fits = False  # whether the memory suffices for all rows
    _kept: RowsInMemory | None = None  # the rows in memory, if there is room
    _shared: MadeOnce | None = None  # decoded chunks that the ranks of the node share
    _firsts: np.ndarray | None = None  # of a source of some files: their first rows, counted in all files

    def __init__(self, manifests: Manifests, structure: Any, file_format: Format, check_finite: bool = False):
        self._manifests, self._structure, self._format = manifests, structure, file_format
        _, self._rebuild = nest.flatten(structure)
        self._reader = file_format.reader(MOST_DECODED)
        self._check_finite, self._buffers = check_finite, Buffers()

    def _with(self, **attributes: Any) -> FileSource:
        """Return a copy with some other attributes."""
        source = FileSource.__new__(FileSource)
        vars(source).update({**vars(self), "_buffers": Buffers(), **attributes})
        return source

    @classmethod
    def open(
        cls,
        file_format: Format,
        files: Any,
        datasets: Any,
        manifest: str | os.PathLike[str] | None = None,
        check_finite: bool = False,
    ) -> FileSource:
        """Return the source of these files.

        In a job of one process, files are found and the first is described at once. Several ranks do so in `agree`.
        """
        structure = _checked_structure(datasets, file_format.named)
        kept_in = None if manifest is None else os.path.abspath(manifest)
        names, _ = nest.flatten(structure)
        file_list = FileList(files, file_format.name, file_format.folders)
        manifests = Manifests(file_list, names, kept_in, file_format.describe, str(file_format), file_format.filtered)
        source = cls(manifests, structure, file_format, check_finite)
        if not mpi.among_several():
            source._manifests.begin()
        return source

    def __len__(self) -> int:
        return self._manifest.rows

    def element_spec(self) -> Any:
        columns = (self._built or self._manifests.first()).columns
        return self._rebuild([ArraySpec(column.shape, column.dtype) for column in columns])

    def read(self, rows: np.ndarray) -> Any:
        """Return these rows. Each file is read once, in ascending order."""
        out = self._taken(rows)
        if out is None:
            columns = self._manifest.columns
            out = [self._buffers.empty((len(rows), *column.shape), column.dtype) for column in columns]
            if len(rows):
                self._read_files(rows, out)
        if self._check_finite:
            self._refuse_not_finite(rows, out)
        return self._rebuild(out)

    def _read_files(self, rows: np.ndarray, out: Sequence[np.ndarray]) -> None:
        first, last = int(rows[0]), int(rows[-1])
        # Rows that follow each other. tobytes() takes half the time of all().
        if last - first == len(rows) - 1 and 0 not in (rows[1:] > rows[:-1]).tobytes():
            for number, start, stop in self._in_files(first, last + 1):
                path, record, begin = self._manifest.file(number)
                part = [values[start - first : stop - first] for values in out]
                self._reader.read_run(path, record, start - begin, part)
        else:
            self._read_rows(rows, out)

    def _taken(self, rows: np.ndarray) -> list[np.ndarray] | None:
        """Return these rows of the memory, or None if the files cannot be read into it."""
        if self._kept is None:
            return None
        try:
            return self._kept.take(rows, self._buffers)
        except (DataFileError, OSError) as error:
            # From now on, rows are read batch by batch: an error of a file is then raised at the batch that has it.
            if not isinstance(error, DataFileError):
                _log.warning(_NOT_KEPT, self, error)
            self._kept = None
            return None

    def _refuse_not_finite(self, rows: np.ndarray, out: Sequence[np.ndarray]) -> None:
        manifest = self._manifest
        for column, values in zip(manifest.columns, out, strict=True):
            if wrong := first_not_finite(values):
                row, value = int(rows[wrong[0]]), wrong[1]
                path, _, begin = manifest.file(int(manifest.offsets.searchsorted(row, side="right")) - 1)
                raise NotFiniteError(
                    f"file {path!r}, dataset {column.name!r}: row {row - begin} has the value {value}; fix: write the "
                    "row again, or leave check_finite out to read it as it is"
                )

    def _read_rows(self, rows: np.ndarray, out: Sequence[np.ndarray]) -> None:
        manifest = self._manifest
        order = np.argsort(rows, kind="stable")
        wanted = rows[order]
        # Readers take each row once: a row that is wanted twice is copied at the end.
        first = np.append(True, wanted[1:] != wanted[:-1])
        wanted, positions = wanted[first], order[first]
        low = int(manifest.offsets.searchsorted(wanted[0], side="right")) - 1
        high = int(manifest.offsets.searchsorted(wanted[-1], side="right"))
        ends = wanted.searchsorted(manifest.offsets[low : high + 1]).tolist()
        for number, (start, stop) in enumerate(pairwise(ends), low):
            if start < stop:
                path, record, begin = manifest.file(number)
                self._reader.read_rows(path, record, wanted[start:stop] - begin, out, positions[start:stop])
        if len(wanted) < len(rows):
            again = positions[np.cumsum(first) - 1]
            for values in out:
                values[order] = values[again]

    def __getstate__(self) -> dict[str, Any]:
        # The memory belongs to this process, or to the node.
        return {**self.__dict__, "_kept": None, "_shared": None}

    def _in_files(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield (file, first, last) for each file that has rows of the range ``first`` up to ``last``."""
        offsets = self._manifest.offsets
        number = int(offsets.searchsorted(first, side="right")) - 1
        while first < last:
            stop = min(last, int(offsets[number + 1]))
            if first < stop:
                yield number, first, stop
            first, number = stop, number + 1

    def advise(self, spans: np.ndarray) -> None:
        for first, last in spans.tolist():
            for number, start, stop in self._in_files(first, last):
                path, record, begin = self._manifest.file(number)
                self._reader.will_need(path, record, start - begin, stop - begin)

    def file_rows(self) -> Sequence[int]:
        return [record.rows for record in self._manifest.records]

    def of_files(self, which: Sequence[int]) -> FileSource:
        files = [self._manifest.files[i] for i in which]
        part = Manifest.of(files, [self._manifest.records[i] for i in which])
        # Size and window of the blocks of all files: a state records these, so all replicas must have them.
        blocks = self.blocks()._replace(starts=part.offsets)
        kept = None if self._kept is None else self._kept.of_files(which)
        reader = copy.copy(self._reader) if self._shared else self._reader  # without the ring
        firsts = self._manifest.offsets[np.asarray(which, np.int64)]
        return self._with(_built=part, _blocks=blocks, _kept=kept, _reader=reader, _shared=None, _firsts=firsts)

    def of_column(self, name: Any) -> FileSource:
        try:
            column = self._structure[name]
        except (KeyError, IndexError, TypeError):
            return self
        names, _ = nest.flatten(self._structure)
        if isinstance(self._structure, str) or not isinstance(column, str) or not self._format.columns_apart:
            return self
        at, manifest = names.index(column), self._manifest
        records = [record._replace(columns=(record.columns[at],)) for record in manifest.records]
        # Another reader: it keeps layouts by the number of a column, which is another one here.
        reader, like = self._format.reader(MOST_DECODED), {name: column}
        part = self._with(_built=Manifest.of(manifest.files, records), _structure=like, _reader=reader, _kept=None)
        part._rebuild = nest.flatten(like)[1]
        return part

    def numbers_of_all(self, ks: np.ndarray) -> np.ndarray:
        if self._firsts is None:
            return ks
        file = self._manifest.offsets.searchsorted(ks, side="right") - 1
        return self._firsts[file] + ks - self._manifest.offsets[file]

    def by_file(self) -> FileSource:
        return self if self._kept is None else self._with(_kept=self._kept.by_file())

    def side_by_side(self) -> int:
        """Return the most files whose chunks can be kept decoded together, and that can be kept open."""
        if self._fits:  # the first row of a file reads all
            return MOST_LANES
        decoded = self._chunk_bytes(2)  # chunks of one row are decoded once in any case
        return min(_MOST_READ_BY_STEP, MOST_DECODED // 2 // decoded) if decoded else _MOST_READ_BY_STEP

    def ready(self, memory: int, sharing: int | None = None, ranks: Topology | None = None) -> FileSource:
        """Return the source whose rows the ranks of a node decode together, where they must be decoded."""
        most = self._most_decoded(MOST_DECODED)
        if not most or getattr(ranks, "node", None) is None:
            return self
        rows = len(self) * self._manifest.row_bytes
        make = partial(MadeOnce, most, rows + len(self._manifest.files) * most)
        shared = made_by_node(ranks, make, "each rank decodes what it needs")
        if shared is None:
            return self
        return self._with(_reader=self._sharing_reader(MOST_DECODED, shared), _shared=shared)

    def _sharing_reader(self, most_decoded: int, shared: MadeOnce | None) -> Any:
        reader = self._format.reader(most_decoded)
        if shared is not None:
            reader.share(shared)
        return reader

    def _most_decoded(self, most: int) -> int:
        """Return the bytes of decoded chunks that a node shares for each rank, or 0.

        They are twice what a rank would keep by itself: with less, ranks far from each other decode chunks twice.
        """
        largest = self._chunk_bytes()
        return 2 * max(most, largest) if largest else 0

    def _chunk_bytes(self, rows: int = 1) -> int:
        """Return the bytes of the largest decoded chunks of all datasets, of chunks with at least ``rows`` rows."""
        largest: dict[str, int] = {}
        for record in self._manifest.records:
            for column in record.columns:
                for chunk in column.decoded:
                    if chunk.rows >= rows:
                        largest[column.name] = max(largest.get(column.name, 0), chunk.nbytes)
        return sum(largest.values())

    def for_shuffle(
        self, nbytes: int, wanted: int | None, sharing: int | None = None, ranks: Topology | None = None
    ) -> FileSource:
        """Return the source that keeps the rows in memory if they fit, and otherwise reads windows as wholes.

        None are kept for less than an eighth of the rows, nor rows of 16 KiB or variable length.
        """
        manifest = self._manifest
        if not 0 < manifest.row_bytes < _SMALL_ROW or self._has_objects:
            return self
        share = nbytes // (sharing or 1)
        blocks, reader, kept, fits = self.blocks(), self._reader, None, False
        if len(self) * manifest.row_bytes > nbytes:
            # The whole of two windows for each rank: it decodes all chunks of a window for its own rows. With a part of
            # the node's memory, 2 ranks decoded 62 row groups 118 times.
            decoded = decoded_bytes(nbytes)
            blocks, reader = manifest.blocks(nbytes), self._sharing_reader(decoded, self._shared)
            if self._shared is not None:
                self._shared.limit(self._most_decoded(decoded))
        elif wanted is None or wanted >= len(self) * _LEAST_SHARE:
            # The order of lanes depends on `fits`, and not on `kept`: ranks may lack memory.
            fits, kept = True, self._rows_in_memory(share if sharing or not mpi.among_several() else 0, ranks)
        return self._with(_blocks=blocks, _reader=reader, _shuffle_bytes=share, _kept=kept, _fits=fits)

    def _rows_in_memory(self, nbytes: int, ranks: Topology | None) -> RowsInMemory | None:
        """Return the rows in memory of the node, or of this rank if it has ``nbytes`` for them."""
        manifest, block_rows = self._manifest, self.blocks().rows
        make = partial(RowsInMemory, manifest, self._reader, block_rows)
        kept = made_by_node(ranks, make, "each rank reads the files by itself")
        if kept is not None:
            return kept
        if manifest.row_bytes * len(self) > nbytes:
            return None
        try:
            return make()
        except OSError as error:  # the limit of the address space
            _log.warning(_NOT_KEPT, self, error)
            return None

    @property
    def in_memory(self) -> bool:
        """Whether the rows are in memory, or will be after the first read."""
        return self._kept is not None

    @property
    def decodes_again(self) -> bool:
        """Whether there are chunks with filters, and more of them than are kept decoded."""
        filtered = any(column.filtered for column in self._manifest.columns)
        return not self.in_memory and filtered and self._manifest.row_bytes * len(self) > MOST_DECODED

    @property
    def _has_objects(self) -> bool:
        """Whether values have variable length."""
        return any(column.dtype.hasobject for column in self._manifest.columns)

    def announced(self) -> bool:
        """Return whether read-ahead helps: not for rows in memory."""
        return not self.in_memory

    def agree(self, ranks: Topology) -> None:
        """Build the manifest together with the other ranks. Collective, even if a rank already has a manifest."""
        self._built = self._manifests.shared(ranks)
        self._blocks = None

    def blocks(self) -> Blocks:
        if self._blocks is None:
            self._blocks = self._manifest.blocks()
        return self._blocks

    def rows_in_two_reads(self, share: float) -> int:
        """Return the rows in 4 MiB, since larger buffers exceed the CPU cache; in 512 KiB of rows in memory.

        Small rows that are shuffled and do not fit are read a window in each call, so that every row is read once.
        """
        if self._has_objects:  # of unknown size. Those of a block are in memory anyway
            return min(self.blocks().rows, _OBJECTS_AT_ONCE) if self._format.in_blocks else 0
        row_bytes = max(1, self._manifest.row_bytes)
        if self.in_memory:
            return IN_MEMORY_AT_ONCE // row_bytes
        if self._shuffle_bytes is None:
            return _AT_ONCE_BYTES // row_bytes
        blocks, most = self.blocks(), max(self._shuffle_bytes // OF_MEMORY, LEAST_WINDOW_BYTES)
        return 2 * min(math.ceil(blocks.rows * blocks.window * share), most // row_bytes)

    def identity(self) -> dict[str, Any]:
        """Return names, lengths and sizes of the files, and the sizes of the blocks."""
        manifest = self._manifest
        if self._identified is None or self._identified[0] is not manifest:
            blocks = self.blocks()
            identity = {**manifest.identity(), "blocks": [int(blocks.rows), int(blocks.window)]}
            self._identified = manifest, identity
        return dict(self._identified[1])

    def versions(self) -> dict[str, list[int]]:
        manifest = self._manifest
        return {path: [it.size, it.mtime_ns] for path, it in zip(manifest.files, manifest.records, strict=True)}

    def fingerprint(self) -> Any:
        return f"{self._manifests.names()}, {self._format}, {self._format.named} {self._structure!r}"

    @property
    def _manifest(self) -> Manifest:
        if self._built is None:
            self._built = self._manifests.local()
        return self._built

    def __repr__(self) -> str:
        return repr(self._manifests.files)


def _checked_structure(datasets: Any, named: str) -> Any:
    if isinstance(datasets, list):
        datasets = tuple(datasets)
    names, _ = nest.flatten(datasets)
    if not names:
        raise ValueError(f"{named} must name at least one, got {datasets!r}")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{named} are named by strings, alone or in a tuple or dict, not {name!r}")
    return datasets
