"""HDF5 files that grow by steps, and are whole on the disk after each commit.

HDF5 changes its metadata in place, in several writes. h5py with early allocation and bytes written at its offsets was
tried in these ways, with two datasets and a flush each three steps:

- In place: of the 1,271 places in 200 flushes where a program may be killed, 400 left a good file. 300 left one that
  cannot be opened, 199 datasets of different lengths, and 372 steps without values.
- SWMR mode: all of 60 files of killed programs were whole, but have a mark that plain readers refuse. They need
  ``swmr=True``, also while the program runs. Neither new attributes nor new datasets are possible, and a power failure
  does not keep the order of the writes.
- An index that HDF5 makes anew in memory for each flush: 70 ms at 10,000 steps, and here a flush takes 1.8 ms.
- Zarr passes the kills. On 2 ranks it took 2.0, 2.2 and 1.3 times as long for steps of 4 KiB, 256 KiB and 16 MiB of
  each rank with a flush each 10 (each 4 of the last), and 0.9 times for steps of 8 bytes.

So nothing is changed in place in an HDF5 file here. A commit adds new metadata at the end: the groups, datasets and
attributes as HDF5 writes them (it works in memory, behind a hole as long as the file), and those nodes of the chunk
indexes that are new (B-trees of version 1, section III.A.1 of the HDF5 file format). Then, between two syncs, one write
of 40 bytes of the superblock replaces the end of the file and the address of the root group. Before it the file has the
old steps, after it the new ones. A reader that opened the file earlier goes on with the steps of that time. A commit
adds about 2 KiB, and 4 KiB for each dataset with new chunks.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpistrat.data.errors import DataFileError, naming
from mpistrat.data.hdf5.locate import chunk_index
from mpistrat.data.hdf5.open_file import opened
from mpistrat.data.write.output_file import Storage
from mpistrat.process.files import appearing, write_all
from mpistrat.storage.hdf5 import SparseFile, place_at_once
from mpistrat.storage.layout import Box, write_box

_FIRST = 4096  # where the first commit begins, behind what HDF5 lays down when it makes a file
_VERSION_0 = b"\x89HDF\r\n\x1a\n\0"  # of the superblock; it has no checksum
_END = 40  # bytes of it before the end of the file, which the address of the root group follows
_CHILDREN = 64  # of a node, which a superblock of version 0 implies
_UNDEFINED = b"\xff" * 8
_PAGE = 4096
_CODES = {None: [], "gzip": [2, 1], "zstd": [2, 32015]}  # of HDF5's filters: shuffle, then the compression


class StepSeries:
    """A dataset whose first axis grows. ``shape`` is the shape of a step, ``chunk`` begins with a number of steps.

    ``steps`` counts the appended steps, of which ``committed`` are in the file. ``boxes`` has one box for each rank.
    """

    def __init__(self, name: str, dtype: np.dtype, shape: tuple[int, ...], chunk: tuple[int, ...]):
        self.name, self.dtype, self.shape, self.chunk = name, dtype, shape, chunk
        self.attributes: dict[str, Any] = {}
        self.steps = self.committed = 0
        self.offset = 0  # where the chunk of the last step begins in the file
        self.boxes: Sequence[Box] = ()
        self._parts: dict[int, list[tuple[int, Box, tuple[slice, ...]]]] = {}
        self.grid = tuple(-(-size // part) for size, part in zip(shape, chunk[1:], strict=True))
        self.cells = math.prod(self.grid)  # chunks that a step lies in
        self.chunk_bytes = math.prod(chunk) * dtype.itemsize
        self.compressed = False

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype} {self.shape}"

    def parts(self, rank: int) -> list[tuple[int, Box, tuple[slice, ...]]]:
        """Return the cells that a rank writes to: number, the box inside of the cell, and the elements of the block."""
        # A dataset has the same blocks in every step.
        if rank not in self._parts:
            self._parts[rank] = [*self._divided(rank)]
        return self._parts[rank]

    def _divided(self, rank: int) -> Iterator[tuple[int, Box, tuple[slice, ...]]]:
        box, sizes = self.boxes[rank], self.chunk[1:]
        if 0 in box.shape or (rank and not self.shape):  # rank 0 writes what is the same on all
            return
        for cell in itertools.product(*(range(o // c, -(-(o + n) // c)) for o, n, c in zip(*box, sizes, strict=True))):
            offset = tuple(i * c for i, c in zip(cell, sizes, strict=True))
            common = box.common(Box(offset, sizes))
            inside = Box(tuple(o - at for o, at in zip(common.offset, offset, strict=True)), common.shape)
            number = int(np.ravel_multi_index(cell, self.grid)) if cell else 0
            yield number, inside, common.slices(box.offset)


def rows_of_a_chunk(name: str, dtype: np.dtype, part: Sequence[int], largest: int) -> tuple[int, ...]:
    """Return the shape of ``part`` with as many rows as ``largest`` bytes have. Raise ValueError if no row fits."""
    nbytes = math.prod(part) * dtype.itemsize
    if nbytes <= largest:
        return tuple(part)
    rows = largest // (nbytes // part[0])
    if not rows:
        raise ValueError(f"{name!r}: an element along axis 0 has {nbytes // part[0]} bytes; fix: swap the axes")
    # A divisor, so that the chunks of a rank end where its block does.
    fitting = (count for count in range(rows, rows // 4, -1) if part[0] % count == 0)
    return next(fitting, rows), *part[1:]


class GrowingFile:
    """What files of all formats have that grow by steps."""

    whole_steps = False  # a chunk is a step, unless it is compressed
    encodes = False  # a chunk is always given as a whole to `store`
    shards: int | None = None  # steps of a shard

    def update_guard(self, attributes: Mapping[str, Any]) -> bool:
        """Replace the guard if it has attributes that differ from these. Return whether it was replaced."""
        return False

    def close(self) -> None:
        """Close what this rank has open."""


class GrowingHdf5(GrowingFile):
    """The file as one rank has it open. All ranks call `put` and `store` in the same order, and rank 0 `commit`."""

    whole_steps = True

    def __init__(self, path: Path, compress: str | None):
        self._path, self._codes = path, _CODES[compress]
        self._filters = Storage(None, compress).filters
        self.guard, self.guards = path, (path,)
        self.end = _FIRST
        self._trees: dict[str, _ChunkTree] = {}
        self._descriptor = -1

    def make(self, replace: bool) -> None:
        """Make a file without steps. Raise FileExistsError if there is one, unless it may be replaced."""
        with appearing(self._path, replace) as temporary:
            self._descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                self.commit({}, {})  # writes the superblock, too
            finally:
                self.close()

    def attach(self) -> int:
        """Open the file. Return where the next chunk may begin, which rank 0 knows."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        return self.end

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def existing(self) -> tuple[list[StepSeries], dict[str, Any]]:
        """Return the datasets and the attributes of the file. Raise DataFileError if no such writer has made it."""
        series: list[StepSeries] = []
        others: list[str] = []

        def look(name: str, item: Any) -> None:
            one = self._series_of(name, item) if isinstance(item, h5py.Dataset) else None
            if one is not None:
                series.append(one)
            elif not isinstance(item, h5py.Group) or item.attrs:
                others.append(name)

        with opened(str(self._path)) as file, naming(f"file {str(self._path)!r}"):
            with open(self._path, "rb") as raw:
                # `commit` writes the end of the file and the root where this version has them, without a checksum.
                if raw.read(len(_VERSION_0)) != _VERSION_0:
                    others.append("its superblock")
            file.visititems(look)
            attributes = dict(file.attrs)
        if others:
            raise DataFileError.of_file(str(self._path), not_of_writer(others))
        self.end = os.path.getsize(self._path)
        return series, attributes

    def _series_of(self, name: str, item: h5py.Dataset) -> StepSeries | None:
        """Return a dataset of the file as `create` and `commit` made it, None if it is another one."""
        creation, chunk = item.id.get_create_plist(), item.chunks
        codes = [creation.get_filter(i)[0] for i in range(creation.get_nfilters())]
        if not chunk or item.maxshape[0] is not None or codes not in ([], self._codes) or item.dtype.hasobject:
            return None
        series = StepSeries(name, item.dtype, item.shape[1:], chunk)
        series.compressed = bool(codes)
        # `put` writes the chunks of a step as one array, so they may divide its first axis only.
        in_runs = chunk[2:] == item.shape[2:] and (chunk[0] == 1 or series.cells == 1)
        index = chunk_index(item, f"file {str(self._path)!r}, dataset {name!r}")
        series.steps = series.committed = item.shape[0]
        if not (in_runs or codes) or len(index.numbers) != -(-series.steps // chunk[0]) * series.cells:
            return None
        self._trees[name] = _ChunkTree(series, np.stack([index.offsets, index.sizes, index.masks], 1).ravel())
        series.attributes.update(item.attrs)
        series.offset = int(index.offsets[-series.cells])
        return series

    def create(self, series: StepSeries) -> None:
        """Take a new dataset. Raise an error of h5py if HDF5 cannot make it."""
        self._metadata({series.name: series}, {}, {})
        self._trees[series.name] = _ChunkTree(series)

    def check(self, attributes: Mapping[str, Any]) -> None:
        """Raise an error of h5py if HDF5 cannot store these attributes."""
        self._metadata({}, attributes, {})

    def put(self, series: StepSeries, values: np.ndarray, rank: int) -> None:
        """Write this rank's block of the next step where it belongs. Raise OSError if that fails."""
        row, slot = divmod(series.steps, series.chunk[0])
        nbytes = series.cells * series.chunk_bytes
        if slot == 0:
            # The first step of a chunk takes the room of all its steps.
            series.offset = self._allocate(nbytes, _PAGE if nbytes >= _PAGE else 8)
            for cell in range(series.cells) if series.name in self._trees else ():  # rank 0 has the index
                offset = series.offset + cell * series.chunk_bytes
                self._trees[series.name].record(row * series.cells + cell, offset, series.chunk_bytes)
        if series.shape or rank == 0:  # all ranks have the same number
            offset = series.offset + slot * (nbytes // series.chunk[0])
            write_box(self._descriptor, values, series.boxes[rank].offset, series.shape, offset)

    def store(self, series: StepSeries, chunks: Mapping[int, np.ndarray], ranks: Any) -> None:
        """Compress the chunks that this rank has of the next step, and write them. Collective.

        Raise OSError if writing fails.
        """
        compressed: dict[int, tuple[int, bytes]] = {}

        def compress() -> list[tuple[int, int, int]]:
            compressed.update({cell: self._compressed(chunk) for cell, chunk in chunks.items()})
            return [(cell, len(data), mask) for cell, (mask, data) in compressed.items()]

        everyone = ranks.on_all_ranks(compress)
        offsets = {}
        # Every rank computes the same offsets.
        for cell, nbytes, mask in sorted(itertools.chain.from_iterable(everyone)):
            offsets[cell] = self._allocate(nbytes, 1)
            if series.name in self._trees:
                self._trees[series.name].record(series.steps * series.cells + cell, offsets[cell], nbytes, mask)
        for cell, (_, data) in compressed.items():
            write_all(self._descriptor, data, offsets[cell])

    def _compressed(self, chunk: np.ndarray) -> tuple[int, bytes]:
        """Return the mask of the filters that HDF5 has skipped, and the stored bytes of a chunk."""
        # HDF5 runs the filters, in a file in memory. It tells open files apart by their names, also these.
        with h5py.File(f"{id(self)}.h5", "w", driver="core", backing_store=False) as file:
            dataset = file.create_dataset("x", data=chunk, chunks=chunk.shape, **self._filters)
            stored: tuple[int, bytes] = dataset.id.read_direct_chunk((0,) * chunk.ndim)
            return stored

    def _allocate(self, nbytes: int, alignment: int) -> int:
        offset = -(-self.end // alignment) * alignment
        self.end = offset + nbytes
        return offset

    def sync(self) -> None:
        """Bring what this rank has written to the disk. Raise OSError if that fails."""
        os.fdatasync(self._descriptor)

    def commit(self, all_series: Mapping[str, StepSeries], attributes: Mapping[str, Any]) -> int:
        """Make all steps part of the file, which are on the disk already. Return where the next chunk may begin."""
        is_new = self.end == _FIRST
        roots = {name: self._trees[name].root(self._append, series.steps) for name, series in all_series.items()}
        superblock, metadata, root = self._metadata(all_series, attributes, roots)
        self._append(metadata)
        if is_new:
            write_all(self._descriptor, superblock, 0)
        self.sync()  # before the next write, which HDF5 believes
        write_all(self._descriptor, struct.pack("<Q8sQQQ", self.end, _UNDEFINED, 0, root, 0), _END)
        self.sync()
        return self.end

    def _append(self, data: bytes) -> int:
        offset = self._allocate(len(data), 8)
        write_all(self._descriptor, data, offset)
        return offset

    def _metadata(
        self, all_series: Mapping[str, StepSeries], attributes: Mapping[str, Any], roots: Mapping[str, int]
    ) -> tuple[bytes, bytes, int]:
        """Return a superblock, groups and datasets that are to lie at the end of the file, and where their root is."""
        start, memory = -(-self.end // 8) * 8, SparseFile()
        headers: dict[str, int] = {}
        with h5py.File(memory, "w", libver="earliest", meta_block_size=0) as file:
            # The hole: HDF5 puts the metadata behind it, where the file ends now.
            h5py.h5d.create(file.id, b"-", h5py.h5t.STD_U8LE, h5py.h5s.create_simple((start,)), place_at_once())
            root = file.create_group("root")
            root.attrs.update(attributes)
            for name, series in all_series.items():
                dataset = root.create_dataset(
                    name,
                    (series.steps, *series.shape),
                    series.dtype,
                    chunks=series.chunk,
                    maxshape=(None, *series.shape),
                    **(self._filters if series.compressed else {}),
                )
                dataset.attrs.update(series.attributes)
                headers[name] = h5py.h5o.get_info(dataset.id).addr
            address = h5py.h5o.get_info(root.id).addr
        image, superblock = bytearray(memory.size - start), b""
        for offset, data in memory.written():
            if offset >= start:
                image[offset - start : offset - start + len(data)] = data
            elif offset == 0:
                superblock = data
        for name, offset in roots.items():
            series = all_series[name]
            sizes = *series.chunk, series.dtype.itemsize
            layout = struct.pack(f"<BBB8s{len(sizes)}I", 3, 2, len(sizes), _UNDEFINED, *sizes)
            # Put the address of the index in place of the undefined one: HDF5 made these datasets without chunks.
            at = image.index(layout, headers[name] - start) + 3
            image[at : at + 8] = struct.pack("<Q", offset)
        return superblock, bytes(image), address


class _ChunkTree:
    """The index of the chunks of a dataset. Nodes whose chunks do not change any more are written once."""

    def __init__(self, series: StepSeries, chunks: Any = ()):
        self._series = series
        self._chunks = array("Q", chunks)  # place, bytes and skipped filters of each
        self._nodes: list[list[int]] = []  # the places of nodes that do not change, by level
        self._root: int | None = None

    def record(self, number: int, offset: int, nbytes: int, mask: int = 0) -> None:
        """Note where a chunk lies: the next one, or an earlier one that has moved."""
        self._chunks[3 * number : 3 * number + 3] = array("Q", (offset, nbytes, mask))
        self._root = None

    def root(self, append: Callable[[bytes], int], steps: int) -> int:
        """Return the address of the root for so many steps, after writing new nodes by ``append(data)``."""
        if self._root is not None:
            return self._root
        chunks = np.array(self._chunks, np.uint64).reshape(-1, 3)
        children: Any = chunks[:, 0]
        final = steps // self._series.chunk[0] * self._series.cells  # children that do not change
        level, span = 0, 1
        while level == 0 or len(children) > 1:
            if level == len(self._nodes):
                self._nodes.append([])
            unchanging, new = self._nodes[level], list[int]()
            for first in range(_CHILDREN * len(unchanging), len(children), _CHILDREN):
                part = children[first : first + _CHILDREN]
                address = append(self._node(level, span, first, part, chunks))
                (unchanging if first + _CHILDREN <= final else new).append(address)
            children, final = [*unchanging, *new], len(unchanging)
            level, span = level + 1, span * _CHILDREN
        self._root = children[0]
        return children[0]

    def _node(self, level: int, span: int, first: int, children: Sequence[int], chunks: np.ndarray) -> bytes:
        """Return a node whose children have ``span`` chunks each. There is a key left and right of each child."""
        series, count = self._series, len(children)
        numbers = np.minimum((first + np.arange(count + 1)) * span, len(chunks))
        axes = len(series.chunk)
        keys = np.zeros(
            _CHILDREN + 1, [("bytes", "<u4"), ("mask", "<u4"), ("offset", "<u8", (axes + 1,)), ("child", "<u8")]
        )
        keys["bytes"][:count], keys["mask"][:count] = chunks[numbers[:-1], 1:].T
        keys["child"][:count] = children
        corners = np.unravel_index(numbers, (int(numbers[-1]) // series.cells + 1, *series.grid))
        keys["offset"][: count + 1, :-1] = np.stack(corners, 1) * series.chunk
        head = struct.pack("<4sBBH8s8s", b"TREE", 1, level, count, _UNDEFINED, _UNDEFINED)
        return head + keys.tobytes()[:-8]  # the last key has no child


def not_of_writer(names: Sequence[str]) -> str:
    """Return what is wrong with a file that has other contents than a `Writer` makes."""
    shown = ", ".join(map(repr, names[:5]))
    return (
        f"mode 'a' goes on with files that a Writer with the same compress= has made, and {shown} is not of that kind; "
        "fix: write another file, or give compress=, zarr_format= and shards= of the first run"
    )
