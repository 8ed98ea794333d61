"""Rows of HDF5 files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.data.contracts import Peers
from mpistrat.data.file_list import expand
from mpistrat.data.manifest import Manifest, Manifests
from mpistrat.data.read_hdf5 import Reader
from mpistrat.data.spec import ArraySpec


class Hdf5Source:
    """The rows of several files, one after another.

    The manifest is built when it is first needed: by this process alone, or with the peers in `agree`.
    """

    def __init__(
        self,
        files: Sequence[str],
        structure: Any,
        manifests: Manifests | None = None,
        manifest: Manifest | None = None,
        reader: Reader | None = None,
    ):
        self._files = files
        self._structure = structure
        self._names, self._rebuild = nest.flatten(structure)
        self._manifests = manifests or Manifests(files, self._names)
        self._built = manifest
        self._reader = reader or Reader()

    @classmethod
    def open(cls, files: Any, datasets: Any) -> Hdf5Source:
        """The source of these files, of which the first is described at once."""
        structure = _checked_structure(datasets)
        source = cls(expand(files), structure)
        source._manifests.first()
        return source

    def __len__(self) -> int:
        return int(self._manifest.offsets[-1])

    def element_spec(self) -> Any:
        """The structure of one row, as the first file has it."""
        record = self._built.records[0] if self._built else self._manifests.first()
        return self._rebuild([ArraySpec(column.shape, column.dtype) for column in record.columns])

    def read(self, rows: np.ndarray) -> Any:
        """These rows, each file read once, in ascending order."""
        manifest = self._manifest
        ascending = bool((np.diff(rows) >= 0).all())
        order = None if ascending else np.argsort(rows, kind="stable")
        wanted = rows if order is None else rows[order]
        columns = manifest.records[0].columns
        out = [np.empty((len(rows), *column.shape), column.dtype) for column in columns]
        ends = np.searchsorted(wanted, manifest.offsets[1:], side="left")
        start = 0
        for number in np.flatnonzero(np.diff(ends, prepend=0)).tolist():
            stop = int(ends[number])
            self._reader.read(
                manifest.files[number],
                manifest.records[number],
                wanted[start:stop] - manifest.offsets[number],
                [values[start:stop] for values in out],
            )
            start = stop
        if order is not None:
            out = [_unsorted(values, order) for values in out]
        return self._rebuild(out)

    def file_rows(self) -> Sequence[int]:
        """How many rows each file has."""
        return [record.rows for record in self._manifest.records]

    def of_files(self, which: Sequence[int]) -> Hdf5Source:
        """The rows of some of the files."""
        files = [self._manifest.files[i] for i in which]
        part = Manifest.of(files, [self._manifest.records[i] for i in which])
        return Hdf5Source(files, self._structure, self._manifests, part, self._reader)

    def agree(self, peers: Peers) -> None:
        """Build the manifest together; always collective, whoever has one already."""
        self._built = self._manifests.shared(peers)

    def fingerprint(self) -> Any:
        """Number and names of the files (folders may differ between nodes), and of the HDF5 datasets."""
        names = "/".join(os.path.basename(path) for path in self._files)
        digest = hashlib.blake2b(names.encode(errors="surrogateescape"), digest_size=6).hexdigest()
        return f"{len(self._files)} files (names hash to {digest}), datasets {self._structure!r}"

    @property
    def _manifest(self) -> Manifest:
        if self._built is None:
            self._built = self._manifests.local()
        return self._built

    def __repr__(self) -> str:
        return f"{len(self._files)} HDF5 files"


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


def _unsorted(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    placed = np.empty_like(values)
    placed[order] = values
    return placed
