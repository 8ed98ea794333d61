"""Writing arrays to a checkpoint file, by one rank or by several.

HDF5 assigns the offsets of the arrays in the file. Their bytes are written there directly, without HDF5 and the lock
of h5py. A thread that reads through h5py meanwhile waits for microseconds, never for the disk. The index that HDF5
writes stays in memory until the arrays are in the file. Its last write makes the file a valid HDF5 file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import h5py
import numpy as np

from mpistrat.arrays.arrays import as_bytes, to_host
from mpistrat.process.files import appearing, require_space, write_all
from mpistrat.process.waiting import begin_call
from mpistrat.storage.hdf5 import SparseFile, place_at_once
from mpistrat.storage.layout import Box, NewArray, RankPart, checksum, parts_of_ranks, piece_of, write_box
from mpistrat.training.checkpoint.format import CHECKSUM, CHECKSUMS, DTYPE, FORMAT, OF_BOXES, PIECE_BYTES, XXH3, stored

_PAGE = 4096
_INDEX_BLOCK = 64 << 10
_BEGUN_AT = 16 << 20  # bytes of the file that the disk begins to write at once
_SMALL = 64 << 10  # bytes that the caller writes itself: a write takes less time than handing it to a thread
_flush = getattr(os, "fdatasync", os.fsync)


def write(values: Mapping[str, np.ndarray], path: Path) -> None:
    """Write contiguous arrays to a file, whole or not at all. Make its directory if needed.

    Raise OSError if the file cannot be written, for example because the disk is full. An earlier file is unchanged.
    """
    arrays = {name: NewArray(value.dtype, value.shape) for name, value in values.items()}
    with contextlib.closing(NewCheckpoint(arrays, values, path)) as new, appearing(path, replace=True) as temporary:
        new.make(temporary)
        new.finish(temporary, [new.write(temporary, new.lay_out())[0]])


class NewCheckpoint:
    """A new file, and what rank ``rank`` of ``size`` does for it. ``writers`` are the ranks that see its directory.

    ``values`` has what this rank holds of the arrays.
    """

    def __init__(
        self,
        arrays: Mapping[str, NewArray],
        values: Mapping[str, Any],
        path: Path,
        rank: int = 0,
        writers: Sequence[int] = (0,),
        size: int = 1,
    ):
        self._arrays, self._values, self._path = arrays, values, path
        self.shares, self.piece = parts_of_ranks(arrays, writers, size), piece_of(arrays)
        self.parts = self.shares[rank]
        self._memory = SparseFile()
        self._file: Any = None
        self._datasets: dict[str, Any] = {}

    @contextlib.contextmanager
    def _explained(self) -> Iterator[int]:
        """Let an OSError say that this file was not written, and how large it is. Yield that number of bytes."""
        nbytes = sum(array.nbytes for array in self._arrays.values())
        try:
            yield nbytes
        except OSError as error:
            if error.errno is None:
                raise
            text = f"{error.strerror}, so a checkpoint of {nbytes} bytes was not written"
            raise OSError(error.errno, text, str(self._path)) from error

    def make(self, temporary: Path) -> None:
        """Make an empty file on rank 0, and its directory if needed."""
        with self._explained() as nbytes:
            # Only if nothing is there: mkdir would report a file as FileExistsError, and not as not a directory.
            if not self._path.parent.exists():
                self._path.parent.mkdir(parents=True, exist_ok=True)
            require_space(self._path, nbytes)
            temporary.touch(exist_ok=False)

    def lay_out(self) -> list[int]:
        """Make the index, in memory of rank 0. Return the offset of each array in the file, 0 if it is empty."""
        # By rank 0 alone, which sends the offsets: HDF5 takes 18 ms of a core for 200 arrays. With an index on each
        # rank, a save of 220 MB took 1.3 times as long on cores that had other work.
        layout = {"alignment_threshold": _PAGE, "alignment_interval": _PAGE, "meta_block_size": _INDEX_BLOCK}
        self._file = h5py.File(self._memory, "w", libver=FORMAT, **layout)
        creation, link = place_at_once(), h5py.h5p.create(h5py.h5p.LINK_CREATE)
        link.set_create_intermediate_group(True)
        link.set_char_encoding(h5py.h5t.CSET_UTF8)
        for name, (dtype, shape, *_) in self._arrays.items():
            kind = h5py.h5t.py_create(stored(dtype), logical=True)
            space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
            dataset = h5py.h5d.create(self._file.id, name.encode(), kind, space, creation, link)
            if stored(dtype) != dtype:
                h5py.Dataset(dataset).attrs[DTYPE] = np.bytes_(dtype.name)
            self._datasets[name] = dataset
        return [dataset.get_offset() or 0 for dataset in self._datasets.values()]

    def on_host(self) -> dict[str, np.ndarray]:
        """Return this rank's parts as contiguous arrays: views, or copies from a GPU."""
        return {str(i): _part_of(self._values[part.name], part) for i, part in enumerate(self.parts)}

    def write(
        self,
        temporary: Path,
        offsets: Sequence[int],
        values: Mapping[str, np.ndarray] | None = None,
        compared: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> tuple[list[int], dict[str, list[int]]]:
        """Write this rank's share, or these ``values`` of it. Sync it if other ranks write, too.

        Return its checksums, and the checksums of ``compared`` arrays. They are computed while the disk works.
        """
        if not self.parts:  # it may not see the file
            return [], self._checksums_of(compared)
        share = list(zip(self.parts, (self.on_host() if values is None else values).values(), strict=True))
        by_name, checksums = dict(zip(self._arrays, offsets, strict=True)), list[int]()
        written: list[Future[None]] = []
        thread = ThreadPoolExecutor(1, "mpistrat-write")
        with self._explained(), open(temporary, "r+b", 0) as file:
            try:
                for part, value in share:
                    put = partial(_put, file.fileno(), part, value, self._arrays[part.name].shape, by_name[part.name])
                    written += [begin_call(thread, put)] if value.nbytes >= _SMALL else put() or ()
                of_all = self._checksums_of(compared)
                for part, value in share:
                    # The checksums of compared arrays are known for all their pieces.
                    known = of_all.get(part.name)
                    digest = known[part.start // self.piece] if known else checksum(as_bytes(value).data, part.name)
                    checksums.append(digest)
                for future in written:
                    future.result()
            finally:
                # After an error the queued writes are of no use.
                thread.shutdown(cancel_futures=True)
            if len(self.shares) > 1:  # each node holds the pages that its own ranks wrote
                _flush(file.fileno())
        return checksums, of_all

    def _checksums_of(self, values: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
        flat, piece = {name: as_bytes(value).data for name, value in values.items()}, self.piece
        return {
            name: [checksum(data[at : at + piece], name) for at in range(0, max(1, len(data)), piece)]
            for name, data in flat.items()
        }

    def finish(self, temporary: Path, results: Iterable[Sequence[int]]) -> None:
        """Write the index on rank 0, with the checksums of each rank, when all have written."""
        rows: dict[str, list[Any]] = {name: [] for name in self._arrays}
        for parts, checksums in zip(self.shares.values(), results, strict=True):
            for part, number in zip(parts, checksums, strict=True):
                rows[part.name].append(number if part.box is None else (*part.box.offset, *part.box.shape, number))
        for name, (_, shape, _, boxes) in self._arrays.items():
            numbers, dataset = np.array(rows[name], np.uint64), self._datasets[name]
            if boxes:
                table = numbers.reshape(-1, 2 * len(shape) + 1)
                dataset = self._file.create_dataset(OF_BOXES + name, data=table).id
                numbers = np.array([checksum(as_bytes(table).data, name)], np.uint64)
            kind, space = h5py.h5t.py_create(numbers.dtype), h5py.h5s.create_simple(numbers.shape)
            # attrs[...] takes five times as long.
            h5py.h5a.create(dataset, CHECKSUMS.encode(), kind, space).write(numbers)
        self._file.attrs[PIECE_BYTES] = np.int64(self.piece)
        self._file.attrs[CHECKSUM] = np.bytes_(XXH3)
        # HDF5 writes the index now, to memory. It goes to the file last, and makes it a valid HDF5 file.
        self.close()
        with self._explained(), open(temporary, "r+b", 0) as file:
            for offset, data in self._memory.written():
                write_all(file.fileno(), data, offset)
            file.truncate(self._memory.size)

    def close(self) -> None:
        """Close HDF5's file in memory, on rank 0."""
        self._datasets.clear()
        if self._file is not None:
            self._file.close()


def _part_of(value: Any, part: RankPart) -> np.ndarray:
    if part.box is not None:
        block = next(b for b in value if part.box == part.box.common(Box(b.offset, b.shape)))
        return np.asarray(to_host(block.array[part.box.slices(block.offset)]), order="C")
    size = max(1, value.dtype.itemsize)
    # The piece ends inside an element, such as a text of 3 bytes.
    if part.start % size or part.stop % size:
        return as_bytes(np.asarray(to_host(value), order="C"))[part.start : part.stop]
    return np.asarray(to_host(value.reshape(-1)[part.start // size : part.stop // size]))


def _put(descriptor: int, part: RankPart, value: np.ndarray, shape: tuple[int, ...], offset: int) -> None:
    """Write a part of an array that begins at byte ``offset``. The disk begins at once."""
    if part.box is not None:
        write_box(descriptor, value, part.box.offset, shape, offset)
        return
    write_all(descriptor, as_bytes(value).data, offset + part.start)
    begun, end = ((offset + position) // _BEGUN_AT * _BEGUN_AT for position in (part.start, part.stop))
    if begun < end and hasattr(os, "posix_fadvise"):
        # Linux begins to write these pages, and keeps them. A thread that synced instead took 1.1 times as long.
        os.posix_fadvise(descriptor, begun, end - begun, os.POSIX_FADV_DONTNEED)
