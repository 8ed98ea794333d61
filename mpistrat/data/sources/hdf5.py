"""Source of rows of HDF5 files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.data.errors import NotFiniteError
from mpistrat.data.hdf5.file_list import FileList
from mpistrat.data.hdf5.manifest import Manifest, Manifests
from mpistrat.data.hdf5.reader import Reader
from mpistrat.data.rows.blocks import Blocks
from mpistrat.data.rows.contracts import Peers, Source
from mpistrat.data.rows.finite import first_not_finite
from mpistrat.data.rows.spec import ArraySpec
from mpistrat.runtime.memory.buffer_pool import Buffers
from mpistrat.runtime.process import launch, mpi

_AT_ONCE_BYTES = 4 << 20


class Hdf5Source(Source):
    """The rows of HDF5 files, one file after another.

    The manifest is built when it is first needed: by this process alone, or together with the peers in `agree`.
    """

    def __init__(
        self,
        manifests: Manifests,
        structure: Any,
        manifest: Manifest | None = None,
        reader: Reader | None = None,
        check_finite: bool = False,
        blocks: Blocks | None = None,
    ):
        self._manifests = manifests
        self._structure = structure
        _, self._rebuild = nest.flatten(structure)
        self._built = manifest
        self._identified: tuple[Manifest, dict[str, Any]] | None = None
        self._reader = reader or Reader()
        self._buffers = Buffers()
        self._check_finite = check_finite
        self._blocks = blocks

    @classmethod
    def open(
        cls,
        files: Any,
        datasets: Any,
        manifest: str | os.PathLike[str] | None = None,
        check_finite: bool = False,
    ) -> Hdf5Source:
        """Return the source of these files.

        In a job of one process, the files are found and the first one is described at once. With several ranks
        that would be done on every rank. So it is left to `agree`, where the ranks share the files.
        """
        structure = _checked_structure(datasets)
        kept_in = None if manifest is None else os.path.abspath(manifest)
        names, _ = nest.flatten(structure)
        source = cls(Manifests(FileList(files), names, kept_in), structure, check_finite=check_finite)
        if not _among_several():
            source._manifests.begin()
        return source

    def __len__(self) -> int:
        return int(self._manifest.offsets[-1])

    def element_spec(self) -> Any:
        """Return the structure of one row of the first file."""
        record = self._built.records[0] if self._built else self._manifests.first()
        return self._rebuild([ArraySpec(column.shape, column.dtype) for column in record.columns])

    def read(self, rows: np.ndarray) -> Any:
        """Return these rows. Each file is read once, in ascending order."""
        manifest = self._manifest
        columns = manifest.records[0].columns
        out = [self._buffers.empty((len(rows), *column.shape), column.dtype) for column in columns]
        if not len(rows):
            return self._rebuild(out)
        first, last = int(rows[0]), int(rows[-1])
        if last - first == len(rows) - 1 and 0 not in (rows[1:] > rows[:-1]).tobytes():
            for number, start, stop in self._in_files(first, last + 1):
                begin = int(manifest.offsets[number])
                self._reader.read_run(
                    manifest.files[number],
                    manifest.records[number],
                    start - begin,
                    [values[start - first : stop - first] for values in out],
                )
        else:
            self._read_rows(rows, out)
        if self._check_finite:
            self._refuse_not_finite(rows, out)
        return self._rebuild(out)

    def _refuse_not_finite(self, rows: np.ndarray, out: Sequence[np.ndarray]) -> None:
        manifest = self._manifest
        for column, values in zip(manifest.records[0].columns, out, strict=True):
            if found := first_not_finite(values):
                row, value = int(rows[found[0]]), found[1]
                number = int(manifest.offsets.searchsorted(row, side="right")) - 1
                raise NotFiniteError(
                    f"file {manifest.files[number]!r}, dataset {column.name!r}: row "
                    f"{row - int(manifest.offsets[number])} has the value {value}; fix: write the row again, or "
                    "leave check_finite out to read it as it is"
                )

    def _read_rows(self, rows: np.ndarray, out: Sequence[np.ndarray]) -> None:
        order = np.argsort(rows, kind="stable")
        wanted = rows[order]
        again = wanted[1:] == wanted[:-1]
        if again.any():
            first = np.append(True, ~again)
            of = order[np.flatnonzero(first)[np.cumsum(first) - 1]]
            self._read_ascending(wanted[first], order[first], out)
            for values in out:
                values[order[~first]] = values[of[~first]]
        else:
            self._read_ascending(wanted, order, out)

    def _read_ascending(self, wanted: np.ndarray, order: np.ndarray, out: Sequence[np.ndarray]) -> None:
        manifest = self._manifest
        low = int(manifest.offsets.searchsorted(wanted[0], side="right")) - 1
        high = int(manifest.offsets.searchsorted(wanted[-1], side="right"))
        ends = wanted.searchsorted(manifest.offsets[low : high + 1]).tolist()
        for number, (start, stop) in enumerate(pairwise(ends), low):
            if start == stop:
                continue
            self._reader.read_rows(
                manifest.files[number],
                manifest.records[number],
                wanted[start:stop] - manifest.offsets[number],
                out,
                order[start:stop],
            )

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
        """Start read-ahead of these rows."""
        manifest = self._manifest
        for first, last in spans.tolist():
            for number, start, stop in self._in_files(first, last):
                begin = int(manifest.offsets[number])
                self._reader.will_need(
                    manifest.files[number], manifest.records[number], start - begin, stop - begin
                )

    def file_rows(self) -> Sequence[int]:
        """Return the number of rows of each file."""
        return [record.rows for record in self._manifest.records]

    def of_files(self, which: Sequence[int]) -> Hdf5Source:
        """Return a source of the rows of some of the files."""
        files = [self._manifest.files[i] for i in which]
        part = Manifest.of(files, [self._manifest.records[i] for i in which])
        # Size and window of the blocks of all files: a state records these, so all replicas must have them.
        blocks = self.blocks()._replace(starts=part.offsets)
        return Hdf5Source(self._manifests, self._structure, part, self._reader, self._check_finite, blocks)

    def agree(self, peers: Peers) -> None:
        """Build the manifest together with the peers. Collective, even if a rank already has a manifest."""
        self._built = self._manifests.shared(peers)
        self._blocks = None

    def blocks(self) -> Blocks:
        """Return the blocks: chunks, or about 1.5 MiB of rows."""
        if self._blocks is None:
            self._blocks = self._manifest.blocks()
        return self._blocks

    def at_once(self) -> int:
        """Return the number of rows in 4 MiB. Larger buffers exceed the CPU cache and are filled more slowly."""
        columns = self._manifest.records[0].columns
        if any(column.dtype.hasobject for column in columns):  # values of variable length
            return 0
        return _AT_ONCE_BYTES // max(1, sum(column.row_bytes for column in columns))

    def identity(self) -> dict[str, Any]:
        """Return names, lengths and sizes of the files, and the sizes of the blocks."""
        manifest = self._manifest
        if self._identified is None or self._identified[0] is not manifest:
            blocks = self.blocks()
            identity = {**manifest.identity(), "blocks": [int(blocks.rows), int(blocks.window)]}
            self._identified = manifest, identity
        return dict(self._identified[1])

    def fingerprint(self) -> Any:
        """Return number and names of the files, and the HDF5 datasets."""
        return f"{self._manifests.names()}, datasets {self._structure!r}"

    @property
    def _manifest(self) -> Manifest:
        if self._built is None:
            self._built = self._manifests.local()
        return self._built

    def __repr__(self) -> str:
        return repr(self._manifests.files)


def _among_several() -> bool:
    """Return whether other ranks run the same program."""
    if mpi.running():
        return bool(mpi.start().COMM_WORLD.size > 1)
    started = launch.started_tasks(os.environ)
    return started is not None and started.tasks > 1


def _checked_structure(datasets: Any) -> Any:
    if isinstance(datasets, list):
        datasets = tuple(datasets)
    names, _ = nest.flatten(datasets)
    if not names:
        raise ValueError(f"datasets must name at least one HDF5 dataset, got {datasets!r}")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"HDF5 datasets are named by strings, alone or in a tuple or dict, not {name!r}")
    return datasets
