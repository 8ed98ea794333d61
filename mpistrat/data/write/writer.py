"""Output of simulations: datasets that grow by steps, written by all ranks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import math
import os
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from mpistrat import context
from mpistrat.arrays.arrays import as_numpy
from mpistrat.data.errors import DatasetMismatchError
from mpistrat.data.pipeline.transforms import integer
from mpistrat.data.write.blocks import Block
from mpistrat.data.write.growing import GrowingHdf5, StepSeries, rows_of_a_chunk
from mpistrat.data.write.growing_zarr import GrowingZarr, GrowingZarr3
from mpistrat.data.write.output_file import column_of
from mpistrat.data.write.write import check_targets
from mpistrat.mesh import ShardedArray
from mpistrat.process import mpi
from mpistrat.process.files import local_path, require_space
from mpistrat.representation import ranges, require
from mpistrat.runtime.agreement.collective_lock import collective_call
from mpistrat.runtime.agreement.operation import MismatchError, Operation, operation
from mpistrat.runtime.topology import Topology
from mpistrat.storage.layout import Box, require_cover
from mpistrat.storage.write import writers

_SMALL = 64 << 10  # bytes of a chunk that has several steps
_LARGEST, _LARGEST_COMPRESSED = (4 << 30) - 1, 16 << 20  # bytes of a chunk
_GUARDED = 1 << 40  # a byte that no file has; the writer holds a lock on it
_CREATE, _COMMIT = operation("Writer: make a dataset"), operation("Writer: commit the steps")
_EXCHANGE = operation("Writer: exchange rows")
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


def _ranks_of(writer: Writer) -> Topology:
    return writer._ranks


class _RankBlock(NamedTuple):
    """One rank's block of a step. ``box`` is None if the blocks of the ranks lie side by side."""

    dtype: np.dtype
    shape: tuple[int, ...]
    box: Box | None
    global_shape: tuple[int, ...]

    @property
    def form(self) -> tuple[Any, ...]:
        """What ranks have in common: blocks side by side may differ along axis 0 only, boxes have one global shape."""
        return self.box is None, len(self.shape), self.shape[1:] if self.box is None else self.global_shape

    def __str__(self) -> str:
        position = "" if self.box is None else f" at {self.box.offset} of {self.global_shape}"
        return f"{self.dtype} {self.shape}{position}"


class Writer:
    """A file to which all ranks append the steps of a simulation. A context manager.

    Each name is a dataset whose first axis grows by one with every step. After `flush` the file is whole: other
    programs read the steps so far while it grows, and if this one is killed at any moment, they remain. Steps that the
    program neither flushes nor closes are lost, with a warning at its end. All methods but `steps` are collective.

    Parameters
    ----------
    path : path
        The same on all ranks. A folder of Zarr if it ends in ``.zarr``, else one HDF5 file.
    mode : {"w", "a"}
        Whether to make a new file, or to go on with one that a `Writer` has made, if there is one.
    overwrite : bool
        Whether mode ``"w"`` may replace an existing file.
    compress : {"gzip", "zstd"}, optional
        How to compress datasets whose steps have more than 32 KiB. Each rank compresses its own block, in HDF5 after
        the shuffle filter. ``"zstd"`` needs the package hdf5plugin, or numcodecs for Zarr.
    attributes : dict, optional
        Attributes of the file. Those of rank 0 count.
    zarr_format : {2, 3}
        The version of Zarr. Version 3 needs the package zarr, at least 3.
    shards : int, optional
        With version 3, the number of steps of a shard: one file of all chunks of as many steps, for each rank's block.
        One rank has it in memory until it is complete, and writes it. By default a file is a chunk.
    strategy : Strategy, optional
        Whose ranks write. By default those of the current strategy, and without one all ranks of the job.

    Raises
    ------
    ValueError
        On every rank, if the arguments differ between the ranks or are wrong.
    TypeError
        On every rank, if the file cannot have an attribute, or ``shards`` is not an integer.
    FileExistsError, FileNotFoundError, PermissionError
        On every rank, as for other files.
    DataFileError
        In mode ``"a"``, if the file is damaged, or has other contents than a `Writer` makes.
    OSError
        If another program is writing to the file, or a rank cannot write to files that rank 0 makes in this folder.

    Notes
    -----
    In HDF5, ranks write their boxes where these belong, without parallel HDF5. A chunk is one step, or 64 KiB of small
    steps. With ``compress``, and in Zarr, it is one rank's block of a step. Blocks of one size are the fastest, then:
    where chunks do not end with blocks, ranks exchange rows.

    A flush takes two syncs of the disk and, in HDF5, 2 KiB of the file, and 4 KiB for each dataset. Do not flush small
    steps one by one.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name) / "heat.h5"
    >>> with Writer(path, attributes={"rate": 0.2}) as writer:
    ...     for step in range(3):
    ...         writer.append("u", np.full((2, 4), step), attributes={"unit": "K"})
    ...         writer.append("time", 0.1 * step)
    ...         writer.flush()
    >>> import h5py
    >>> with h5py.File(path) as file:
    ...     file["u"].shape, file["time"].shape
    ((3, 2, 4), (3,))
    >>> folder.cleanup()
    """

    _path = Path()
    _store: Any = None  # a GrowingHdf5 or GrowingZarr
    _guard: Any = None
    _unclosed: Any = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Literal["w", "a"] = "w",
        *,
        overwrite: bool = False,
        compress: Literal["gzip", "zstd"] | None = None,
        attributes: Mapping[str, Any] | None = None,
        zarr_format: Literal[2, 3] = 2,
        shards: int | None = None,
        strategy: Any = None,
    ):
        if strategy is None and not context.is_default():
            strategy = context.current().strategy
        self._ranks: Topology = (
            Topology.of(mpi.start().COMM_WORLD) if strategy is None else strategy.extended.engine.all_ranks
        )
        self._closed = False
        self._failure: Exception | None = None
        self._attributes = dict(attributes or {})

        def described() -> tuple[Any, ...]:
            self._path = local_path(path)
            require(mode in ("w", "a"), "mode must be 'w' or 'a'", mode)
            check_targets([self._path], None, compress, overwrite or mode == "a")
            self._store = _store_of(self._path, compress, zarr_format, shards)
            self._check(self._attributes)
            return os.fspath(path), mode, overwrite, compress, zarr_format, shards

        self._ranks.lock.compare(operation("Writer"))  # within the limit of time, which the next call has not
        everyone = self._ranks.on_all_ranks(described)
        for rank, arguments in enumerate(everyone):
            if arguments != everyone[0]:
                raise ValueError(
                    f"the ranks must write one file in the same way, but rank {rank} has {arguments} and rank 0 has "
                    f"{everyone[0]} (path, mode, overwrite, compress, zarr_format, shards)"
                )
        able, folder = writers(self._ranks, self._path.parent), self._path.parent
        if len(able) < self._ranks.size:
            raise OSError(
                f"only the ranks {ranges(able)} of {self._ranks.size} can write to files that rank 0 makes in "
                f"{folder}; fix: write to a folder that all nodes share"
            )
        try:
            begin = partial(self._begin, mode == "a", overwrite)
            self._series = self._ranks.on_all_ranks(begin if self._ranks.rank == 0 else dict)[0]
            self._store.end = self._ranks.on_all_ranks(self._store.attach)[0]
        except BaseException:
            self._release()
            raise
        self._compress = compress is not None
        # Without a flush: the other ranks may not be here.
        known = self._series if self._ranks.rank == 0 else {}
        self._unclosed = weakref.finalize(self, _close_files, self._path, known, self._store, self._guard)

    def _begin(self, goes_on: bool, overwrite: bool) -> dict[str, StepSeries]:
        """Make the file, or see what it has, and keep others from writing to it."""
        existing: list[StepSeries] = []
        goes_on = goes_on and self._path.exists()
        if not goes_on:
            with contextlib.ExitStack() as replaced:
                for guard in filter(Path.exists, self._store.guards if overwrite else ()):
                    replaced.enter_context(self._locked(guard))  # refuses to replace what another writer writes
                self._store.make(overwrite)
        if self._store.guard.exists():
            self._guard = self._locked(self._store.guard)
        if goes_on:
            existing, attributes = self._store.existing()
            self._attributes = {**attributes, **self._attributes}
        if self._store.update_guard(self._attributes):
            # `update_guard` has replaced the locked file. Lock the new one before the old lock ends.
            old, self._guard = self._guard, self._locked(self._store.guard)
            old.close()
        return {series.name: series for series in existing}

    def _locked(self, path: Path) -> Any:
        """Return the open file of a guard, locked. Raise OSError if another writer has the lock."""
        guard = path.open("r+b")
        try:
            # Of the open file: a lock of the process would end when it closes the file anywhere, as a reader does.
            fcntl.fcntl(guard, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, _GUARDED, 1, 0))
            fcntl.flock(guard, fcntl.LOCK_SH | fcntl.LOCK_NB)  # HDF5 then opens it for reading only
        except (BlockingIOError, PermissionError):
            guard.close()
            raise OSError(errno.EAGAIN, "another program writes to it", str(self._path)) from None
        except OSError:  # of a file system without locks
            pass
        return guard

    @collective_call(_ranks_of, "Writer.append")
    def append(self, name: str, block: Any, *, attributes: Mapping[str, Any] | None = None) -> None:
        """Append one step to a dataset. The step is in the file after the next `flush`.

        Parameters
        ----------
        name : str
            Name of the dataset, in which ``/`` separates groups. All ranks append to the same one.
        block : array, Block, ShardedArray or number
            This rank's part of the step. Arrays of the ranks lie side by side along their axis 0, in the order of the
            ranks. A `Block` or a `mpistrat.ShardedArray` says where it lies, a mesh having the ranks of
            the writer. A number must be the same on all ranks. Every step of a dataset has
            the same blocks, and a dtype that converts safely to that of the first one.
        attributes : dict, optional
            Attributes of the dataset, to add or to replace. Those of rank 0 count.

        Raises
        ------
        DatasetMismatchError
            On every rank, if a block differs from those of other ranks or of earlier steps, also those of an existing
            file, in dtype or shape. This is a ValueError.
        ValueError
            On every rank, if blocks overlap or leave out elements, a number differs between ranks, or a name is wrong.
        TypeError
            On every rank, if the elements are strings, objects or times: `write_hdf5` writes strings. Also if the file
            cannot have an attribute.
        MismatchError
            On every rank, if one of them appends to another dataset, or makes another call.
        OSError
            On every rank, if this step or an earlier one cannot be written, for example because the disk is full. It
            may come with the next call only. The steps that were flushed remain.
        """

        def check() -> tuple[Operation, tuple[_RankBlock, np.ndarray]]:
            local, values = self._local_block(name, block)
            self._check(attributes or {})
            described = operation("Writer.append", repr(name))
            if not local.shape and local.box is None:
                described = Operation("Writer.append", repr(name), repr(values.tolist()))
            return described, (local, values)

        local, values = self._agreed("Writer.append", check)
        series = self._series.get(name)
        if series is None or not series.boxes:  # the first step of this run: a file does not say who wrote which block
            series = self._new_series(name, self._ranks.all_gather_object(local))
        series.attributes.update(attributes or {})
        values = values.astype(series.dtype, copy=False)
        chunks = self._chunks(series, values) if series.compressed else None  # raises at once on all ranks
        try:
            if chunks is None:
                self._store.put(series, values, self._ranks.rank)
            else:
                self._store.store(series, chunks, self._ranks)
        except MismatchError:  # raised on all ranks
            raise
        except Exception as error:  # the next call raises it on all ranks
            self._failure = error
        series.steps += 1

    @collective_call(_ranks_of, "Writer.flush")
    def flush(self) -> None:
        """Make all steps so far part of the file, on the disk. Readers that open it later see them.

        Raise OSError on every rank if that fails. The file then has the steps of the last flush.
        """
        self._flush("Writer.flush")

    @collective_call(_ranks_of, "Writer.close")
    def close(self) -> None:
        """Flush, and close the file. A second call does nothing. Raise as `flush`."""
        if not self._closed:
            try:
                self._flush("Writer.close")
            finally:
                self._release()

    def steps(self, name: str) -> int:
        """Return how many steps a dataset has, with the steps of an existing file. Not collective."""
        return self._series[name].steps if name in self._series else 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # After an error of this rank, others may wait in any call: only the end of the program reaches them.
        if error is None:
            self.close()
        else:
            self._release()

    def _flush(self, call: str) -> None:
        self._agreed(call, lambda: (operation(call), None))
        try:
            # The steps of all ranks are on the disk before rank 0 makes them count.
            self._ranks.on_all_ranks(self._store.sync)
            commit = partial(self._store.commit, self._series, self._attributes)
            self._store.end = self._ranks.on_first(commit, _COMMIT)
        except MismatchError:  # raised on all ranks
            raise
        except Exception as error:
            self._failure = error
            raise
        for series in self._series.values():
            series.committed = series.steps

    def _chunks(self, series: StepSeries, values: np.ndarray) -> dict[int, np.ndarray]:
        """Return the chunks of a step that this rank compresses, with their numbers. Collective."""
        size, rank = self._ranks.size, self._ranks.rank
        parts: list[list[Any]] = [[] for _ in range(size)]
        for cell, box, here in series.parts(rank):
            parts[cell % size].append((cell, box, values[here]))  # a chunk that blocks share has one owner
        local, parts[rank] = parts[rank], []  # alltoall() would pickle it
        with self._ranks.lock.collective(_EXCHANGE):
            received = [local, *self._ranks.world.alltoall(parts)]
        chunks: dict[int, np.ndarray] = {}
        for cell, box, part in itertools.chain.from_iterable(received):
            if cell not in chunks:
                chunks[cell] = np.zeros(series.chunk, series.dtype)
            inside: Any = 0, *box.slices((0,) * len(box.shape))
            chunks[cell][inside] = part
        return chunks

    def _release(self) -> None:
        self._closed = True
        if self._unclosed is not None:
            self._unclosed.detach()
        _close_files(self._path, {}, self._store, self._guard)

    def _agreed(self, call: str, check: Callable[[], tuple[Operation, _Result]]) -> _Result:
        """Call ``check``. Return its second result if the first one, the operation, is the same on all ranks.

        If it raises on one rank, all ranks raise its error.
        """
        outcome: Any = None  # an error, or the result
        described = refused = operation(call, "refused")

        def settle() -> _Result:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        try:
            if self._closed:
                raise ValueError(f"{self._path} is closed: append in the with block")
            if self._failure is not None:
                raise self._failure
            described, outcome = check()
        except Exception as error:
            outcome = error
        try:
            self._ranks.lock.compare(described)
        except MismatchError as error:
            # `rc.debug` appends the line that made the call.
            refusals = [report.description.startswith(str(refused)) for report in error.reports]
            if not (any(refusals) and all(report.name == call for report in error.reports)):
                raise
        else:
            return settle()
        self._ranks.on_all_ranks(settle)  # raises: all have come, and a rank has refused
        return settle()

    def _check(self, attributes: Mapping[str, Any]) -> None:
        try:
            if attributes:
                self._store.check(attributes)
        except Exception as error:
            for name in attributes if len(attributes) > 1 else ():
                self._check({name: attributes[name]})  # raises for the one that is wrong
            name, value = next(iter(attributes.items()))
            raise TypeError(
                f"attribute {name!r} is {value!r:.60} of type {type(value).__name__}, which cannot be stored "
                f"({error}); fix: give a number, a text, or an array of less than 64 KiB, times as astype('i8')"
            ) from None

    def _local_block(self, name: str, block: Any) -> tuple[_RankBlock, np.ndarray]:
        """Return this rank's block and its values. Raise if it does not fit the earlier steps."""
        is_name = (
            isinstance(name, str) and "\0" not in name and all(part[:1] not in ("", ".") for part in name.split("/"))
        )
        require(is_name, "a dataset is named as 'u' or 'flow/u', no part beginning with a dot", name)
        box: Box | None = None
        whole_shape: tuple[int, ...] = ()
        if isinstance(block, ShardedArray):
            block.mesh.require_ranks(self._ranks, repr(name))
            is_owner = not block.shape or block.layout.is_first(block.mesh, block.mesh.rank)  # one of equal parts
            part = block.local if is_owner else block.local[:0]
            block = Block(part, block.offset, block.shape) if block.shape else part
        if isinstance(block, Block):
            box, whole_shape, block = Box(block.offset, block.shape), block.global_shape, block.array
        array = as_numpy(block)
        local = _RankBlock(array.dtype, array.shape, box, whole_shape)
        series = self._series.get(name)
        if series is None or not series.boxes:
            if array.dtype.kind in "OSTU" or column_of(name, array[np.newaxis]).dtype.hasobject:
                raise TypeError(f"{name!r}: {array.dtype} is not a number; fix: write strings by write_hdf5")
            return local, array
        earlier = series.boxes[self._ranks.rank]
        same = array.shape == earlier.shape and (box is None or (box, whole_shape) == (earlier, series.shape))
        if not same or not (array.size == 0 or np.can_cast(array.dtype, series.dtype, "safe")):
            raise DatasetMismatchError(
                f"{name!r}: step {series.steps} has a block {local}, and earlier steps had "
                f"{_RankBlock(series.dtype, earlier.shape, earlier, series.shape)}; fix: give each step the same block"
            )
        return local, array

    def _new_series(self, name: str, parts: Sequence[_RankBlock]) -> StepSeries:
        """Return the series of a dataset, whose first step the ranks give. Collective."""
        boxes, shape, dtype = _boxes(name, parts)
        series, known = self._series.get(name), ", ".join(map(str, self._series.values()))
        if series is not None and (series.shape != shape or not np.can_cast(dtype, series.dtype, "safe")):
            raise DatasetMismatchError(
                f"{self._path} has {known}, but the ranks append {name!r} {dtype} {shape}; fix: append steps of these "
                "dtypes and shapes, or write another file"
            )
        if series is None:
            if any(f"{one}/".startswith(f"{name}/") or name.startswith(f"{one}/") for one in self._series):
                raise ValueError(f"{name!r} would be a group and a dataset; the file has {known}")
            steps = max(1, _SMALL // (math.prod(shape) * dtype.itemsize))
            whole = self._store.shards or steps
            # A divisor, so that a shard has whole chunks.
            steps = next(count for count in range(min(steps, whole), 0, -1) if whole % count == 0)
            compressed = self._store.encodes or (self._compress and steps == 1)  # a chunk of several steps changes
            part, largest = shape, _LARGEST
            if compressed or not self._store.whole_steps:
                part = tuple(max(sizes) for sizes in zip(*(box.shape for box in boxes), strict=True))
                largest = _LARGEST_COMPRESSED
            series = StepSeries(name, dtype, shape, (steps, *rows_of_a_chunk(name, dtype, part, largest)))
            series.compressed = compressed

            def create() -> None:
                require_space(self._path, 0 if compressed else series.cells * series.chunk_bytes)
                self._store.create(series)

            self._ranks.on_first(create, _CREATE)
            self._series[name] = series
        series.boxes = boxes
        return series


def _store_of(path: Path, compress: str | None, zarr_format: Any, shards: Any) -> Any:
    is_zarr = path.suffix == ".zarr"
    require(zarr_format in (2, 3), "zarr_format must be 2 or 3", zarr_format)
    if shards is not None:
        shards = integer(shards, "shards", 1)
    if (zarr_format == 3 or shards is not None) and not (zarr_format == 3 and is_zarr):
        raise ValueError(
            "shards= needs zarr_format=3, and zarr_format=3 a path that ends in '.zarr', but these are "
            f"{shards}, {zarr_format}, and {path} ends in {path.suffix!r}; fix: change the path, or leave them out"
        )
    if not is_zarr:
        return GrowingHdf5(path, compress)
    return GrowingZarr(path, compress) if zarr_format == 2 else GrowingZarr3(path, compress, shards)


def _close_files(path: Path, known: Mapping[str, StepSeries], *files: Any) -> None:
    for file in files:
        if file is not None:
            file.close()
    lost = [f"{item.steps - item.committed} of {name!r}" for name, item in known.items() if item.steps > item.committed]
    if lost:
        message = "%s was not closed, so steps are lost: %s; fix: call close() on all ranks, or write a with block"
        _log.warning(message, path, ", ".join(lost))


def _boxes(name: str, parts: Sequence[_RankBlock]) -> tuple[list[Box], tuple[int, ...], np.dtype]:
    """Return the box of each rank, the global shape and the dtype. Raise if the parts do not fit together."""
    one = next((rank for rank, part in enumerate(parts) if 0 not in part.shape), None)
    if one is None:
        raise ValueError(f"{name!r}: the blocks of all ranks are empty, and a step must have an element")
    first = parts[one]
    for rank, part in enumerate(parts):
        if part.form != first.form or (part.dtype != first.dtype and 0 not in part.shape):
            raise DatasetMismatchError(
                f"{name!r}: rank {rank} has a block {part}, and rank {one} has {first}; fix: give blocks of one dtype "
                "that fit together along axis 0, or a Block on every rank"
            )
    if first.box is not None:
        boxes = [part.box for part in parts if part.box is not None]
        require_cover(name, [[box] for box in boxes], first.global_shape)
        return boxes, first.global_shape, first.dtype
    if not first.shape:
        return [Box((), ())] * len(parts), (), first.dtype
    starts = [0, *itertools.accumulate(part.shape[0] for part in parts)]
    rest = first.shape[1:]
    boxes = [Box((start, *[0] * len(rest)), part.shape) for start, part in zip(starts, parts, strict=False)]
    return boxes, (starts[-1], *rest), first.dtype
