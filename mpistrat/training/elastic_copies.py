"""Copies of a program's state in the memory of a node, from which the next run of a lost job goes on.

A run has two copies in turn. Each rank of a node writes its part of the bytes to a file of its own in ``/dev/shm``, so
that every node has the whole state. A copy is whole if all parts have its step and their checksums, and it is
overwritten only when all ranks have written the other one. A rank that is killed at any moment leaves one whole copy.

The files are not checkpoints: a checkpoint of 200 arrays of 4 KB takes 23 ms of a core, most of it for the index of
HDF5, and a copy 2 ms. Copies take 0.5 % of the time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import mmap
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.process import private_file, standby
from mpistrat.runtime.environment import rc
from mpistrat.runtime.topology import Topology
from mpistrat.training.checkpoint.checkpoint import Checkpoint, Status
from mpistrat.training.checkpoint.format import dtype_of, stored
from mpistrat.training.checkpoint.variables import arrays_of
from mpistrat.verify import digest

_MAGIC = b"mpi-copy"
_HEADER = struct.Struct("<8sqIIQQQ")  # the magic, the fields of `_Header`
_UNFINISHED = -1  # in place of a step
_FILE = re.compile(r"(\d+)\.([01])\.(\d+)")  # run, slot, part
_MOST_INDEX = 256 << 20  # bytes that describe the arrays of a copy
_log = logging.getLogger(__name__)


class _Header(NamedTuple):
    step: int
    part: int
    parts: int
    described: int  # bytes of the description of the arrays
    data: int  # bytes of the part
    digest: int  # of both, and of this header


class MemoryCopies:
    """The copies that one run of a program makes. ``steps`` has the steps of the whole copies, the newest last."""

    def __init__(self, folder: Path, topology: Topology, run: int):
        self._folder, self._topology, self._run = folder, topology, run
        self._slots: list[mmap.mmap | None] = [None, None]
        self._begun = 0
        self.steps: list[int] = []

    def write(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy this rank's part of arrays that all ranks have. Collective. The ranks must have met since the last copy.

        Raise OSError on every rank if the memory of a node has no room.
        """
        rank, ranks = self._topology.node.rank, self._topology.node.size
        if self._begun == 1 and rank == 0:  # the first copy of this run is whole on all nodes
            _remove_earlier(self._folder, self._run)
        total = sum(value.nbytes for value in arrays.values())
        start, stop = total * rank // ranks, total * (rank + 1) // ranks
        described = [[name, it.dtype.name, stored(it.dtype).str, it.shape] for name, it in arrays.items()]
        index = json.dumps(described, separators=(",", ":")).encode()
        slot = self._begun % 2
        room = -(-(_HEADER.size + len(index) + -(-total // ranks)) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = self._slots[slot]
        if memory is None or len(memory) != room:  # on all ranks alike
            self._topology.on_all_ranks(lambda: self._reserve(slot, room, total))
            memory = self._slots[slot]
        assert memory is not None
        header = _Header(_UNFINISHED, rank, ranks, len(index), stop - start, 0)
        _HEADER.pack_into(memory, 0, _MAGIC, *header)  # not whole from here on
        end = _HEADER.size + len(index) + stop - start
        memory[_HEADER.size : _HEADER.size + len(index)] = index
        out = np.frombuffer(memory, np.uint8, stop - start, _HEADER.size + len(index))
        at = 0
        for value in arrays.values():
            low, high = max(start, at), min(stop, at + value.nbytes)
            if low < high:
                out[low - start : high - start] = as_bytes(value)[low - at : high - at]
            at += value.nbytes
        # The step comes last: it makes the copy valid.
        header = header._replace(step=step)
        with memoryview(memory) as view:
            header = header._replace(digest=_digest(header, view[_HEADER.size : end]))
        _HEADER.pack_into(memory, 0, _MAGIC, *header)
        self._begun += 1
        self.steps = [*self.steps[-1:], step]

    def _reserve(self, slot: int, room: int, total: int) -> None:
        """Make the file of a slot with ``room`` bytes for this rank. All ranks of the node need ``total`` bytes."""
        private_file.make_folder(self._folder, "remove it")
        path = self._folder / f"{self._run}.{slot}.{self._topology.node.rank}"
        self._slots[slot] = None
        path.unlink(missing_ok=True)
        system = os.statvfs(self._folder)
        # Half of what is free without the copies that are there: they are written over, or removed.
        most = rc.elastic_memory or (system.f_bavail * system.f_frsize + _bytes_in_use(self._folder)) // 2
        if total > most:
            raise OSError(f"{total} bytes in {self._folder}, where at most {most} are taken for a copy")
        descriptor = private_file.open_new(path)
        try:
            os.posix_fallocate(descriptor, 0, room)  # else the first write without room is a SIGBUS
            self._slots[slot] = mmap.mmap(descriptor, room)
        finally:
            os.close(descriptor)


def _bytes_in_use(folder: Path) -> int:
    """Return the bytes of the copies of this node."""
    total = 0
    for path, _, _ in _files(folder):
        with contextlib.suppress(FileNotFoundError):  # another rank has removed it
            total += path.stat().st_blocks * 512
    return total


def _remove_earlier(folder: Path, run: int, kept: Sequence[Path] = ()) -> None:
    """Remove what runs before ``run`` have left on this node, but for the files ``kept``."""
    with contextlib.suppress(OSError):  # of one rank: the others would wait for it
        for of_run in range(run):  # a run that was lost early has one without a copy
            restored_file(folder, of_run).unlink(missing_ok=True)
        for path, of_run, _ in _files(folder):
            if of_run < run and path not in kept:
                path.unlink(missing_ok=True)


def restored_file(folder: Path, run: int) -> Path:
    """Return the path of the checkpoint that a run makes of a copy when it begins."""
    return folder / f"restored-{run}.h5"


def newest(folder: Path, topology: Topology, run: int) -> tuple[int, dict[str, np.ndarray] | None] | None:
    """Return the step and, on rank 0, the arrays of the newest whole copy of runs before ``run`` on any node.

    None if no node has one. Collective.
    """
    newest_copy: tuple[int, dict[str, np.ndarray]] | None = None

    def look() -> int | None:
        nonlocal newest_copy
        if topology.node.rank == 0:
            for step, paths, arrays in _valid_copies(folder, run):
                newest_copy = step, arrays
                _remove_earlier(folder, run, paths)  # before the run needs room for a copy of its own
                break
        return newest_copy and newest_copy[0]

    steps = topology.on_all_ranks(look)
    step = max((s for s in steps if s is not None), default=None)
    if step is None:
        return None
    holder = steps.index(step)
    arrays = newest_copy[1] if newest_copy is not None else None
    if holder:  # the node of rank 0 is new, or was lost
        arrays = topology.broadcast_object(arrays, holder)
    return step, arrays if topology.rank == 0 else None


def newest_steps(folder: Path) -> list[int]:
    """Return the step of the newest copy of each `Copying` of a program. Reads no array."""
    folders = sorted((int(entry.name), entry) for entry in folder.iterdir() if entry.name.isdecimal())
    return [max((step for step, _ in _complete_copies(path)), default=0) for _, path in folders]


def _digest(header: _Header, content: memoryview) -> int:
    return digest(content, digest(_HEADER.pack(_MAGIC, *header._replace(digest=0))))


def _files(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Return the files of parts, each with its run and its slot."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            if match := _FILE.fullmatch(path.name):
                yield path, int(match[1]), int(match[2])


def _complete_copies(folder: Path, run: int | None = None) -> Iterator[tuple[int, list[Path]]]:
    """Return the step and the files of each copy whose parts are all of one step. Only of runs before ``run``."""
    slots: dict[tuple[int, int], list[tuple[_Header, Path]]] = {}
    for path, of_run, slot in _files(folder):
        with contextlib.suppress(OSError, struct.error), path.open("rb") as file:
            magic, *fields = _HEADER.unpack(file.read(_HEADER.size))
            if magic == _MAGIC and (run is None or of_run < run):
                slots.setdefault((of_run, slot), []).append((_Header(*fields), path))
    for parts in slots.values():
        # By step, then by part: the fields of a header in their order.
        parts.sort()
        first = parts[0][0]
        expected = [(first.step, part, first.parts) for part in range(len(parts))]
        if len(parts) == first.parts and first.step != _UNFINISHED and [it[:3] for it, _ in parts] == expected:
            yield first.step, [path for _, path in parts]


def _valid_copies(folder: Path, run: int) -> Iterator[tuple[int, list[Path], dict[str, np.ndarray]]]:
    """Return the step, the files and the arrays of the whole copies of earlier runs, the newest first."""
    for step, paths in sorted(_complete_copies(folder, run), reverse=True):
        try:
            yield step, paths, _read(paths)
        except (OSError, ValueError, TypeError, KeyError) as error:
            _log.warning("the copy of step %d in %s is not used: %s", step, folder, error)


def _read(paths: list[Path]) -> dict[str, np.ndarray]:
    """Return the arrays of a copy by its parts. Raise ValueError if one has changed since it was written."""
    pieces, index = [], b""
    for path in paths:
        content = np.fromfile(path, np.uint8)
        _, *fields = _HEADER.unpack(content[: _HEADER.size].tobytes())
        header = _Header(*fields)
        end = _HEADER.size + header.described + header.data
        if header.described > _MOST_INDEX or end > len(content):
            raise ValueError(f"{path.name} is too short")
        if _digest(header, content[_HEADER.size : end].data) != header.digest:
            raise ValueError(f"the checksum of {path.name} is another one")
        description = content[_HEADER.size : _HEADER.size + header.described].tobytes()
        if index and description != index:
            raise ValueError(f"{path.name} has other arrays")
        index = description
        pieces.append(content[_HEADER.size + header.described : end])
    data = np.concatenate(pieces)
    arrays, at = {}, 0
    for name, of_value, of_file, shape in json.loads(index):
        dtype = dtype_of(of_value, np.dtype(of_file))
        # Bytes of a file are no pointers to Python objects.
        if dtype.hasobject:
            raise ValueError(f"{name!r} is of Python objects")
        nbytes = dtype.itemsize * math.prod(shape)
        arrays[name] = data[at : at + nbytes].view(dtype).reshape(shape)
        at += nbytes
    return arrays


# --- when copies are made --------------------------------------------------------------------------------

_numbers = itertools.count()


class Copying:
    """Copies of the objects of a checkpoint, where ``mpistrat run --elastic`` runs the program; else nothing.

    ``share`` is the part of the time that copies may take, and ``seconds`` what they have taken. Methods are
    collective.
    """

    def __init__(self, checkpoint: Checkpoint, topology: Topology, share: float):
        self._checkpoint, self._topology, self._share = checkpoint, topology, share
        folder = rc.elastic
        # One for each object that makes copies: a program may have two loops, one after the other.
        self._folder = Path(folder, str(next(_numbers))) if folder else None
        self._copies = MemoryCopies(self._folder, topology, rc.restart) if self._folder is not None else None
        self._restored: Status | None = None
        self.seconds = 0.0
        self._last = time.monotonic(), 0  # the end of the last copy, and its step
        self.next = 1  # the step after which the next copy is made

    @property
    def active(self) -> bool:
        """Whether there are copies."""
        return self._copies is not None

    @property
    def steps(self) -> list[int]:
        """The steps of the whole copies of this run, the newest last."""
        return [*self._copies.steps] if self._copies is not None else []

    def restore(self, step: int) -> int:
        """Restore the newest copy of earlier runs if its step is above ``step``. Return the step of the state."""
        if self._folder is not None:
            path = restored_file(self._folder, rc.restart)
            copied = newest(self._folder, self._topology, rc.restart)
            if copied is not None and copied[0] > step:
                from mpistrat.training.checkpoint import write  # h5py

                # By a file, which `Checkpoint.restore` reads. It stays: an optimizer makes its slots at the first step.
                try:
                    self._topology.on_first(lambda: write.write(copied[1] or {}, path))
                except OSError as error:
                    _log.warning("the copy of step %d is not used: %s", copied[0], error)
                else:
                    self._restored = self._checkpoint.restore(path)
                    step = copied[0]
        self._last = time.monotonic(), step
        self.next = step + 1
        return step

    def copy(self, step: int) -> None:
        """Copy the state after ``step``, and let the ranks agree on the next step at which they do."""
        if self._copies is None:
            return
        if not self.seconds:
            # After the first step the program has imported its modules: a standby process imports them in advance.
            standby.note_imports(Path(rc.elastic), rc.restart, self._topology.rank)
            if self._restored is not None and self._folder is not None:
                with contextlib.suppress(AssertionError):  # an object that the program makes later needs the file
                    self._restored.assert_consumed()
                    with contextlib.suppress(OSError):  # of one rank: the others would wait for it
                        restored_file(self._folder, rc.restart).unlink(missing_ok=True)
        began = time.monotonic()
        state, own = self._checkpoint.contents("a copy in memory", step)
        topology, arrays = arrays_of(state, own or None, "a copy in memory", step)
        why = ""
        if arrays is None:
            why = "some of it is shared out over the ranks"
        else:
            try:
                self._copies.write(step, arrays)
            except OSError as error:
                why = str(error)
        if why:
            # For the rest of this run: the next copy would fail in the same way.
            self._copies = None
            if topology.rank == 0:
                _log.warning("the state is not copied to the memory of nodes, only saved in files: %s", why)
            return
        took = time.monotonic() - began
        self.seconds += took
        before, last = self._last
        # The wait after which ``took / (took + wait * of_a_step)`` is the share.
        of_a_step = max(began - before, 1e-6) / (step - last)
        wait = math.ceil(took * (1 / self._share - 1) / of_a_step)
        # By rank 0's clock: the ranks must copy after the same step.
        self.next = step + max(1, topology.broadcast_object(wait))
        self._last = time.monotonic(), step
