"""Writing arrays to a checkpoint file, by one rank or by several.

HDF5 assigns the places of the arrays in the file. Their bytes are written there directly, without HDF5 and without the
lock of h5py. A thread that reads through h5py meanwhile waits for microseconds, never for the disk. The index that HDF5
writes stays in memory until the arrays are in the file. Its last write makes the file a valid HDF5 file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import h5py
import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.data.write.boxes import write_box
from mpistrat.data.write.sparse_file import SparseFile
from mpistrat.process.atomic_file import appearing, require_space
from mpistrat.training.checkpoint.disk_writer import disk_writer
from mpistrat.training.checkpoint.division import NewArray, RankPart, divided, piece_of
from mpistrat.training.checkpoint.format import (
    CHECKSUM,
    CHECKSUMS,
    DTYPE,
    FORMAT,
    OF_BOXES,
    PIECE_BYTES,
    WRITTEN,
    checksum,
    stored,
)

_PAGE = 4096
_INDEX_BLOCK = 64 << 10


def write(values: Mapping[str, np.ndarray], path: Path) -> None:
    """Write contiguous arrays to a file, whole or not at all. Make its directory if needed.

    Raise OSError if the file cannot be written, for example because the disk is full. An earlier file is unchanged.
    """
    arrays = {name: NewArray(value.dtype, value.shape) for name, value in values.items()}
    with explained(arrays, path) as nbytes:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        require_space(path, nbytes)
        shares = divided(arrays, [0], 1)
        with appearing(path, replace=True) as temporary, contextlib.closing(FileIndex(arrays)) as layout:
            temporary.touch(exist_ok=False)
            share = [(part, values[part.name]) for part in shares[0]]
            layout.finish(temporary, shares, {0: write_share(temporary, share, layout.places, arrays)[0]})


@contextlib.contextmanager
def explained(arrays: Mapping[str, NewArray], path: Path) -> Iterator[int]:
    """Let an OSError say that this file was not written, and how large it is. Yield that number of bytes."""
    nbytes = sum(array.nbytes for array in arrays.values())
    try:
        yield nbytes
    except OSError as error:
        if error.errno is None:
            raise
        what = f"{error.strerror}, so a checkpoint of {nbytes} bytes was not written"
        raise OSError(error.errno, what, str(path)) from error


def write_share(
    path: Path,
    share: Sequence[tuple[RankPart, np.ndarray]],
    places: Mapping[str, int],
    arrays: Mapping[str, NewArray],
    sync: bool = False,
    compared: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> tuple[list[int], dict[str, list[int]]]:
    """Write the parts of one rank to a file that exists, and return their checksums in order.

    The array of a part is contiguous. ``places`` are those of `FileIndex`. Also return `checksums_of` arrays to
    compare, which are made while the disk works.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        checksums: list[int] = []
        piece = piece_of(arrays)
        with disk_writer(descriptor) as writer:
            for part, value in share:
                if part.box is None and value.nbytes:
                    writer.put(as_bytes(value).data, places[part.name] + part.start)
            for part, value in share:
                if part.box is not None:
                    write_box(descriptor, value, part.box.offset, arrays[part.name].shape, places[part.name])
            if sync:  # each node holds the pages that its own ranks wrote
                writer.sync()
            of_all = checksums_of(compared, piece)
            for part, value in share:
                if part.name in of_all:
                    first = part.start // piece
                    checksums += of_all[part.name][first : first + part.pieces(piece)]
                else:
                    checksums += _checksums(value, part.name, piece if part.box is None else value.nbytes)
            writer.settle()
        return checksums, of_all
    finally:
        os.close(descriptor)


def checksums_of(values: Mapping[str, np.ndarray], piece: int) -> dict[str, list[int]]:
    """Return the checksums of all pieces of arrays."""
    return {name: _checksums(value, name, piece) for name, value in values.items()}


def _checksums(value: np.ndarray, name: str, piece: int) -> list[int]:
    data, step = as_bytes(value).data, max(1, piece)
    return [checksum(data[start : start + step], name) for start in range(0, max(1, len(data)), step)]


class FileIndex:
    """The index of a new file, in memory. ``places`` has the offset of each array, 0 if it has no bytes."""

    def __init__(self, arrays: Mapping[str, NewArray]):
        self._arrays, self._piece = arrays, piece_of(arrays)
        self._memory = SparseFile()
        self._file = h5py.File(
            self._memory,
            "w",
            libver=FORMAT,
            alignment_threshold=_PAGE,
            alignment_interval=_PAGE,
            meta_block_size=_INDEX_BLOCK,
        )
        self._datasets = dict(_datasets(self._file, arrays))
        self.places = {name: dataset.get_offset() or 0 for name, dataset in self._datasets.items()}

    def finish(
        self, path: Path, shares: Mapping[int, Sequence[RankPart]], checksums: Mapping[int, Sequence[int]]
    ) -> None:
        """Write the index, with what `write_share` returned on each rank, to a file in which all shares are."""
        found: dict[str, list[Any]] = {name: [] for name in self._arrays}
        for rank, parts in shares.items():
            values = iter(checksums.get(rank, ()))
            for part in parts:
                own = [next(values) for _ in range(part.pieces(self._piece))]
                found[part.name] += own if part.box is None else [(*part.box.offset, *part.box.shape, *own)]
        for name, (_, shape, _, boxes) in self._arrays.items():
            numbers = np.array(found[name], np.uint64)
            if boxes:
                table = numbers.reshape(-1, 2 * len(shape) + 1)
                made = self._file.create_dataset(OF_BOXES + name, data=table)
                _set_checksums(made.id, np.array([checksum(as_bytes(table).data, name)], np.uint64))
            else:
                _set_checksums(self._datasets[name], numbers)
        self._file.attrs[PIECE_BYTES] = np.int64(self._piece)
        self._file.attrs[CHECKSUM] = np.bytes_(WRITTEN)
        self.close()
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            with disk_writer(descriptor) as writer:
                for offset, data in self._memory.written():
                    writer.put(memoryview(data), offset)
                writer.settle()
            os.ftruncate(descriptor, self._memory.size)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close HDF5's file in memory."""
        self._datasets.clear()
        self._file.close()


def _datasets(file: h5py.File, arrays: Mapping[str, NewArray]) -> Iterator[tuple[str, Any]]:
    """Create the datasets. Yield each name and its dataset."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    link.set_char_encoding(h5py.h5t.CSET_UTF8)
    for name, (dtype, shape, *_) in arrays.items():
        kind = h5py.h5t.py_create(stored(dtype), logical=True)
        space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
        dataset = h5py.h5d.create(file.id, name.encode(), kind, space, creation, link)
        if stored(dtype) != dtype:
            h5py.Dataset(dataset).attrs[DTYPE] = np.bytes_(dtype.name)
        yield name, dataset


def _set_checksums(dataset: Any, values: np.ndarray) -> None:
    kind, space = h5py.h5t.py_create(values.dtype), h5py.h5s.create_simple(values.shape)
    h5py.h5a.create(dataset, CHECKSUMS.encode(), kind, space).write(values)  # attrs[...] takes five times as long
