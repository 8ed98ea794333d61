"""Writing arrays to a checkpoint file.

HDF5 assigns the place of an array in the file. Its bytes are written there directly, without HDF5 and without the lock
of h5py. A thread that reads through h5py meanwhile waits for microseconds, never for the disk. The index that HDF5
writes stays in memory until the arrays are in the file. Its last write makes the file a valid HDF5 file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.process.atomic_file import appearing
from mpistrat.training.checkpoint.disk_writer import disk_writer
from mpistrat.training.checkpoint.format import (
    CHECKSUM,
    CHECKSUMS,
    DTYPE,
    FORMAT,
    PIECE_BYTES,
    WRITTEN,
    checksum,
    stored,
)
from mpistrat.training.checkpoint.sparse_file import SparseFile

_PIECE = 4 << 20
_MOST_PIECES = 4096  # of an array: HDF5 has room for 64 KiB in an attribute
_PAGE = 4096
_INDEX_BLOCK = 64 << 10


def write(values: Mapping[str, np.ndarray], path: Path) -> None:
    """Write contiguous arrays to a file, whole or not at all. Make its directory if needed.

    Raise OSError if the file cannot be written, for example because the disk is full. An earlier file is unchanged.
    """
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        with appearing(path, replace=True) as temporary:
            _write(values, temporary)
    except OSError as error:
        if error.errno is None:
            raise
        nbytes = sum(value.nbytes for value in values.values())
        what = f"{os.strerror(error.errno)}, so a checkpoint of {nbytes} bytes was not written"
        raise OSError(error.errno, what, str(path)) from error


def _write(values: Mapping[str, np.ndarray], path: Path) -> None:
    piece = _PIECE
    while piece * _MOST_PIECES < max(value.nbytes for value in values.values()):
        piece *= 2
    index = SparseFile()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with disk_writer(descriptor) as writer:
            with h5py.File(
                index,
                "w",
                libver=FORMAT,
                alignment_threshold=_PAGE,
                alignment_interval=_PAGE,
                meta_block_size=_INDEX_BLOCK,
            ) as file:
                datasets = []
                for value, dataset in _datasets(file, values):
                    datasets.append(dataset)
                    if value.nbytes:
                        writer.put(as_bytes(value).data, dataset.get_offset())
                for (name, value), dataset in zip(values.items(), datasets, strict=True):
                    _set_checksums(dataset, _checksums(name, value, piece))
                file.attrs[PIECE_BYTES] = np.int64(piece)
                file.attrs[CHECKSUM] = np.bytes_(WRITTEN)
            for offset, data in index.written():
                writer.put(memoryview(data), offset)
            writer.settle()
        os.ftruncate(descriptor, index.size)
    finally:
        os.close(descriptor)


def _datasets(file: h5py.File, values: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, Any]]:
    """Create the datasets. Yield each array and its dataset."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    link.set_char_encoding(h5py.h5t.CSET_UTF8)
    for name, value in values.items():
        kind = h5py.h5t.py_create(stored(value.dtype), logical=True)
        space = h5py.h5s.create_simple(value.shape) if value.shape else h5py.h5s.create(h5py.h5s.SCALAR)
        dataset = h5py.h5d.create(file.id, name.encode(), kind, space, creation, link)
        if stored(value.dtype) != value.dtype:
            h5py.Dataset(dataset).attrs[DTYPE] = np.bytes_(value.dtype.name)
        yield value, dataset


def _checksums(name: str, value: np.ndarray, piece: int) -> np.ndarray:
    data = as_bytes(value).data
    starts = range(0, max(1, len(data)), piece)
    return np.array([checksum(data[start : start + piece], name) for start in starts], np.uint64)


def _set_checksums(dataset: Any, values: np.ndarray) -> None:
    kind, space = h5py.h5t.py_create(values.dtype), h5py.h5s.create_simple(values.shape)
    h5py.h5a.create(dataset, CHECKSUMS.encode(), kind, space).write(
        values
    )  # attrs[...] takes five times as long
