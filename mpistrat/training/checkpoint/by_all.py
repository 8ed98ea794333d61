"""Checkpoints that all ranks write: arrays in pieces, what a rank has of its own, and boxes."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from mpistrat.arrays import arrays as any_array
from mpistrat.arrays.arrays import as_bytes
from mpistrat.data.write.boxes import Box, require_cover
from mpistrat.data.write.by_all_ranks import all_or_raise, write_by_all, writers
from mpistrat.process.atomic_file import publish, require_no_device, require_space, to_disk, write_all
from mpistrat.process.backoff import Backoff
from mpistrat.process.ranges import ranges
from mpistrat.replicas import ReplicaGroup
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Topology
from mpistrat.training.checkpoint.buffers import SaveBuffer
from mpistrat.training.checkpoint.division import NewArray, RankPart, divided, piece_of
from mpistrat.training.checkpoint.format import comparable
from mpistrat.training.checkpoint.names import BoxedArray, Own

_PAGE = 4096
_SAMPLED = 64  # pages of a variable, of which an asynchronous save compares one
_MOST_NAMED = 3  # arrays in a message, of those that differ between ranks
_LONGEST_TEXT = 1024  # bytes of an error that a rank tells
_MOST_AT_END = 600.0  # seconds for which the end of a program waits for a rank, whose disk may be broken


class _Save:
    """A file that all ranks write, and what this rank does for it. Collective.

    ``values`` has what this rank holds of the arrays. ``digests`` are those of the arrays to compare, after `write`.
    Raise OSError on every rank if a directory is not seen by a rank with parts of its own.
    """

    def __init__(
        self,
        ranks: Topology,
        arrays: Mapping[str, NewArray],
        values: Mapping[str, Any],
        path: Path,
        compared: Mapping[str, np.ndarray] = MappingProxyType({}),
    ):
        from mpistrat.training.checkpoint import write  # h5py. Not in a thread: the program may be at its end there

        seen, self._hdf5 = writers(ranks, path.parent), write
        self.shares = divided(arrays, seen, ranks.size)
        blind = [rank for rank, parts in self.shares.items() if parts and rank not in seen]
        if blind:
            raise OSError(
                f"rank{'s' if len(blind) > 1 else ''} {ranges(blind)} cannot write to rank 0's files in {path.parent}, "
                "and each rank writes its own parts: choose a directory that all nodes share"
            )
        self.parts, self.piece = self.shares[ranks.rank], piece_of(arrays)
        self._arrays, self._values, self._path = arrays, values, path
        self._layout: Any = None
        self._compared, self.digests = compared, dict[str, int]()

    def make(self, temporary: Path) -> None:
        """Make an empty file on rank 0."""
        with self._hdf5.explained(self._arrays, self._path) as nbytes:
            require_no_device(self._path)
            require_space(self._path, nbytes)
            temporary.touch(exist_ok=False)

    def lay_out(self) -> list[int]:
        """Return where each array begins in the file, on rank 0."""
        self._layout = self._hdf5.FileIndex(self._arrays)
        return list(self._layout.places.values())

    def on_host(self) -> dict[str, np.ndarray]:
        """Return what this rank writes, as contiguous arrays: views, or copies of no more than that from a GPU."""
        return {str(i): _part_of(self._values[part.name], part) for i, part in enumerate(self.parts)}

    def write(self, temporary: Path, places: Any, values: Mapping[str, np.ndarray] | None = None) -> list[int]:
        """Write this rank's share and sync it, and return its checksums."""
        checksums: list[int] = []
        if not self.parts:  # it may not see the file
            of_all = self._hdf5.checksums_of(self._compared, self.piece)
        else:
            values = self.on_host() if values is None else values
            with self._hdf5.explained(self._arrays, self._path):
                share = list(zip(self.parts, values.values(), strict=True))
                by_name = dict(zip(self._arrays, places, strict=True))
                checksums, of_all = self._hdf5.write_share(
                    temporary, share, by_name, self._arrays, True, self._compared
                )
        self.digests = {name: _digest(np.array(each, np.uint64)) for name, each in of_all.items()}
        return checksums

    def finish(self, temporary: Path, checksums: Iterable[Sequence[int]]) -> None:
        """Write the index on rank 0, when all ranks have written."""
        with self._hdf5.explained(self._arrays, self._path):
            self._layout.finish(temporary, self.shares, dict(enumerate(checksums)))

    def close(self) -> None:
        """Close HDF5's file in memory, on rank 0."""
        if self._layout is not None:
            self._layout.close()


def _part_of(value: Any, part: RankPart) -> np.ndarray:
    if part.box is not None:
        block = next(each for each in value if part.box == part.box.common(Box(each.offset, each.shape)))
        low = [o - first for o, first in zip(part.box.offset, block.offset, strict=True)]
        value = block.array[tuple(slice(o, o + n) for o, n in zip(low, part.box.shape, strict=True))]
        return np.asarray(any_array.to_host(value), order="C")
    size = value.dtype.itemsize
    if part.start % size or part.stop % size:
        return as_bytes(np.asarray(any_array.to_host(value), order="C"))[part.start : part.stop]
    return np.asarray(any_array.to_host(value.reshape(-1)[part.start // size : part.stop // size]))


def new_arrays(
    ranks: Topology, replicas: ReplicaGroup, own: Mapping[str, Own | BoxedArray]
) -> tuple[dict[str, NewArray], dict[str, Any]]:
    """Return what the ranks have of their own as arrays of a file, and the values of this rank. Collective.

    Raise ValueError on every rank if blocks do not fit together.
    """
    values: dict[str, Any] = {}
    mine: dict[str, list[tuple[np.dtype, tuple[int, ...]]] | tuple[Any, ...]] = {}
    for name, each in own.items():
        if isinstance(each, BoxedArray):
            boxes = tuple(Box(block.offset, block.shape) for block in each.blocks)
            values[name], mine[name] = each.blocks, (each.dtype, each.shape, boxes)
        else:
            named = _own_names(name, each, ranks.rank, replicas)
            own_values = map(comparable, map(any_array.numpy_or_cupy, each.values))
            values.update(zip(named, own_values, strict=True))
            mine[name] = tuple((key, values[key].dtype, tuple(values[key].shape)) for key in named)
    told = ranks.all_gather_object(mine)
    found: dict[str, NewArray] = {}
    for name, each in own.items():
        if not isinstance(each, BoxedArray):
            for rank, of_rank in enumerate(told):
                for key, dtype, shape in of_rank[name]:
                    found.setdefault(key, NewArray(dtype, shape, rank))
            continue
        dtype, shape, _ = told[0][name]
        for rank, of_rank in enumerate(told):
            if of_rank[name][:2] != (dtype, shape):
                raise ValueError(
                    f"{name!r}: the block of rank {rank} is of {of_rank[name][0]} with the global shape "
                    f"{of_rank[name][1]}, and that of rank 0 of {dtype} with {shape}"
                )
        of_ranks = tuple(of_rank[name][2] for of_rank in told)
        require_cover(name, of_ranks, shape)
        found[name] = NewArray(dtype, shape, None, of_ranks)
    return found, values


def _own_names(name: str, own: Own, rank: int, replicas: ReplicaGroup) -> list[str]:
    """Return the names in the file of what this rank has of its own."""
    first = replicas.first if own.by_replica else rank
    return [f"{name}/{first + i}" for i in range(len(own.values))]


def read_own(
    ranks: Topology, replicas: ReplicaGroup, own: Mapping[str, Own | BoxedArray], path: Path
) -> list[tuple[Any, np.ndarray]]:
    """Return what this rank fills of its own, and the values for it, which it reads itself. Collective if it is any."""
    targets: list[tuple[Any, np.ndarray]] = []

    def read_mine() -> None:
        from mpistrat.training.checkpoint.read import read, require_parts

        def new(target: Any) -> np.ndarray:
            dtype, shape = any_array.dtype_and_shape(target)
            targets.append((target, np.empty(shape, dtype.newbyteorder("="))))
            return targets[-1][1]

        values: dict[str, np.ndarray] = {}
        boxes: list[tuple[str, Box, np.ndarray]] = []
        for name, each in own.items():
            if isinstance(each, BoxedArray):
                boxes += [(name, Box(block.offset, each.shape), new(block.array)) for block in each.blocks]
            else:
                count = replicas.size if each.by_replica else ranks.size
                require_parts(path, name, count, each.by_replica)
                values.update(zip(_own_names(name, each, ranks.rank, replicas), map(new, each.values), strict=True))
        read(values, path, boxes)

    if own:
        all_or_raise(ranks, read_mine)
    return targets


def is_one_file(ranks: Topology, path: Path) -> bool:
    """Return whether all ranks see one file, and not one each on disks of their own. Collective."""
    mine = None
    with contextlib.suppress(OSError):
        found = path.stat()
        mine = found.st_ino, found.st_size, found.st_mtime_ns
    told = {*ranks.all_gather_object(mine)}
    return len(told) == 1 and None not in told


def is_small(ranks: Topology, arrays: Mapping[str, NewArray]) -> bool:
    """Return whether rank 0 alone writes arrays that are the same on all ranks."""
    nbytes = sum(each.nbytes for each in arrays.values())
    return ranks.size == 1 or nbytes <= ranks.limits.save_alone_bytes


def write_by_ranks(
    ranks: Topology,
    arrays: Mapping[str, NewArray],
    values: Mapping[str, Any],
    path: Path,
    compared: Mapping[str, np.ndarray],
) -> None:
    """Write a file by all ranks, whole or not at all. Collective. ``values`` has what this rank holds of the arrays.

    Raise OSError on every rank if it cannot be written, and ValueError if ``compared`` has not the same arrays on all.
    """
    with contextlib.closing(_Save(ranks, arrays, values, path, compared)) as saving:

        def make(temporary: Path) -> list[int]:
            saving.make(temporary)
            return saving.lay_out()

        def write(temporary: Path, places: list[int]) -> tuple[list[int], int]:
            return saving.write(temporary, places), _digest_of_all(saving.digests)

        def finish(temporary: Path, results: list[tuple[list[int], int]]) -> None:
            saving.finish(temporary, [checksums for checksums, _ in results])

        def check(results: list[tuple[list[int], int]]) -> None:
            _require_same(ranks, saving.digests, [digest for _, digest in results])

        write_by_all(ranks, "save", path, True, make, write, finish, check)


def refuse_differing(ranks: Topology, compared: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError on every rank if an array is not the same on all. Collective. Takes 10 to 30 ms for 100 MB."""
    digests = {name: _digest(as_bytes(value).data) for name, value in compared.items()}
    _require_same(ranks, digests, ranks.all_gather_object(_digest_of_all(digests)))


def sampled(value: np.ndarray, number: int) -> np.ndarray:
    """Return digests of one page of each `_SAMPLED`, drawn by a number: saves of two states in turn draw all, too."""
    data = as_bytes(value).data
    pages = max(1, min(_SAMPLED, -(-len(data) // _PAGE)))
    first = _digest(struct.pack("<q", number)) % pages * _PAGE  # drawn in 1 us; a generator of NumPy takes 15 an array
    starts = range(first, len(data), _SAMPLED * _PAGE)
    return np.array([_digest(data[start : start + _PAGE]) for start in starts], np.uint64)


def _require_same(ranks: Topology, digests: Mapping[str, int], of_all: Sequence[int]) -> None:
    if len({*of_all}) == 1:
        return
    told = ranks.all_gather_object([*digests.values()])
    differ = [[mine != first for mine, first in zip(each, told[0], strict=True)] for each in told]
    named = [name for name, *of_ranks in zip(digests, *differ, strict=True) if any(of_ranks)]
    where = [rank for rank, each in enumerate(differ) if any(each)]
    shown = ", ".join(map(repr, named[:_MOST_NAMED])) + (", ..." if len(named) > _MOST_NAMED else "")
    raise ValueError(
        f"{len(named)} of {len(digests)} arrays ({shown}) are not the same on all ranks: those of rank"
        f"{'s' if len(where) > 1 else ''} {ranges(where)} differ from rank 0's, and one file has one value of "
        'each; fix: gather the parts of the ranks first, or save(..., differing="chief") to keep those of rank 0'
    )


def _digest(data: Any) -> int:
    return xxhash.xxh3_64_intdigest(data)


def _digest_of_all(digests: Mapping[str, int]) -> int:
    return _digest(np.array([*digests.values()], np.uint64))


# --- in a thread of each rank, without MPI ---------------------------------------------------------------


def begin_alone(
    values: Mapping[str, np.ndarray], path: Path, buffer: SaveBuffer, lost: threading.Event
) -> Callable[[], None]:
    """Copy values, and return the function by which rank 0 alone writes them."""
    from mpistrat.training.checkpoint.write import write  # the program may be at its end in the thread

    return partial(write, buffer.copies(values), path)


def begin_by_ranks(
    ranks: Topology,
    arrays: Mapping[str, NewArray],
    values: Mapping[str, Any],
    path: Path,
    buffer: SaveBuffer,
    lost: threading.Event,
) -> Callable[[], None]:
    """Copy this rank's share, and return the function that writes the copy. Collective.

    The function makes no MPI calls. On rank 0 it gives the file its name, when all ranks have written, or raises what
    any of them raised. In a second temporary file rank 0 tells where the arrays lie, and the others the checksums of
    what they wrote. ``lost`` is set if one could not tell: rank 0 then waits no longer.
    """
    saving, rank = _Save(ranks, arrays, values, path), ranks.rank
    most = max(sum(part.pieces(saving.piece) for part in parts) for parts in saving.shares.values())
    pages = -(-(64 + max(_LONGEST_TEXT, 8 * most, 8 * len(arrays))) // _PAGE)
    slot = pages * _PAGE  # of one rank, so that two nodes do not write to one page

    def files(token: str) -> tuple[Path, Path]:
        return path.with_name(f".{path.name}.{token}.tmp"), path.with_name(f".{path.name}.{token}.marks.tmp")

    def clear() -> None:
        saving.close()
        for file in files(token):
            file.unlink(missing_ok=True)

    def make() -> str:
        temporary, marks = files(token)
        try:
            saving.make(temporary)
            # Written now: the disk may be full when a rank wants to say so.
            marks.write_bytes(bytes(slot * ranks.size))
        except BaseException:
            clear()
            raise
        return token

    token = secrets.token_hex(8)
    token = ranks.on_first(make, operation("save_async: make the file"))
    temporary, marks = files(token)
    copies: dict[str, np.ndarray] = {}
    failed: Exception | None = None
    try:
        copies = buffer.copies(saving.on_host())
    except Exception as error:  # told by the thread: rank 0's waits for it
        failed = error

    def write(places: list[int]) -> list[int]:
        if failed is not None:
            raise failed
        return saving.write(temporary, places, copies)

    def follow() -> None:
        if not saving.parts:  # it may not see the file
            return
        try:
            payload = _numbers(write(_wait(marks, 0, 0, lost)))
        except Exception as error:
            number = error.errno or 0 if isinstance(error, OSError) else 0
            payload = b"\1" + struct.pack("<i", number) + str(error).encode()[:_LONGEST_TEXT]
        _put(marks, slot * rank, payload)

    def lead() -> None:
        try:
            places = saving.lay_out()
            _put(marks, 0, _numbers(places))
            own = write(places)
            others = (
                _wait(marks, slot * other, other, lost) if saving.shares[other] else []
                for other in range(1, ranks.size)
            )
            saving.finish(temporary, [own, *others])
            to_disk(temporary)
            publish(temporary, path, replace=True)
            to_disk(path.parent)
        finally:
            clear()

    return follow if rank else lead


def _numbers(values: list[int]) -> bytes:
    return b"\0" + np.array(values, "<u8").tobytes()


def _put(marks: Path, offset: int, payload: bytes) -> None:
    descriptor = os.open(marks, os.O_WRONLY | os.O_CLOEXEC)
    try:
        head = struct.pack("<QQ", len(payload), xxhash.xxh3_64_intdigest(payload))
        write_all(descriptor, head + payload, offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _wait(marks: Path, offset: int, rank: int, lost: threading.Event) -> list[int]:
    """Return the numbers of a rank as soon as it has told them. Raise what it raised."""
    backoff, ended = Backoff(), math.inf
    while True:
        # Opened anew each time: a network file system shows what other nodes have written where a file is opened.
        with open(marks, "rb", buffering=0) as file:
            file.seek(offset)
            length, digest = struct.unpack("<QQ", file.read(16))
            payload = file.read(length) if length else b""
        if length and xxhash.xxh3_64_intdigest(payload) == digest:
            break
        if not threading.main_thread().is_alive():  # no call of the program can set `lost` any more
            ended = min(ended, time.monotonic())
        if lost.is_set() or time.monotonic() > ended + _MOST_AT_END:
            raise RuntimeError(f"rank {rank} did not tell the others of its part of a checkpoint")
        backoff.pause()
    if payload[:1] == b"\0":
        return [int(each) for each in np.frombuffer(payload, "<u8", offset=1)]
    (number,) = struct.unpack_from("<i", payload, 1)
    text = f"rank {rank}: {payload[5:].decode(errors='replace')}"
    raise OSError(number, text) if number else RuntimeError(text)
