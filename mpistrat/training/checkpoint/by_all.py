"""Checkpoints that all ranks write, now or in threads: arrays in pieces, arrays of single ranks, and boxes."""

from __future__ import annotations

import contextlib
import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays.arrays import as_bytes, dtype_and_shape, numpy_or_cupy
from mpistrat.memory.buffer_pool import new_memory
from mpistrat.process import program_end
from mpistrat.process.files import appearing
from mpistrat.process.waiting import begin_call
from mpistrat.replicas import ReplicaGroup
from mpistrat.representation import few, ranges
from mpistrat.runtime.affinity import cores
from mpistrat.runtime.agreement.operation import MismatchError, operation
from mpistrat.runtime.topology import Slot, Topology
from mpistrat.storage.layout import Box, NewArray, require_cover
from mpistrat.storage.write import await_report, write_by_all, write_report, writers
from mpistrat.training.checkpoint.format import comparable
from mpistrat.training.checkpoint.names import ArrayBlock, PerRank
from mpistrat.verify import digest, digest_of_all

if TYPE_CHECKING:
    from mpistrat.training.checkpoint.write import NewCheckpoint

_ALIGNED = 64  # bytes: no two arrays share a cache line
_COPIED_AT_ONCE = 2 << 20  # bytes that a thread copies at once
_THREADS = 4
_HANDOVER_S = 0.0002


class SaveBuffer(Slot):
    """A buffer that holds arrays of any shapes and dtypes, and is used again for the next ones.

    It grows when needed, and is never freed before the object. Ranks have one for their asynchronous saves, which run
    one at a time: ``count`` have begun.

    Examples
    --------
    >>> buffer = SaveBuffer()
    >>> first = buffer.arrays({"a": np.zeros(3), "b": np.zeros((2, 2), "i4")})
    >>> first["a"].shape, first["b"].dtype
    ((3,), dtype('int32'))
    >>> again = buffer.arrays({"a": np.zeros(3)})["a"]
    >>> np.shares_memory(again, first["a"])
    True
    """

    def __init__(self) -> None:
        self._bytes, self.count = np.empty(0, np.uint8), 0

    def arrays(self, likes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return contiguous arrays of the shapes and dtypes of ``likes``.

        They overwrite the arrays of the previous call.
        """
        ends = np.cumsum([0, *[-(-like.nbytes // _ALIGNED) * _ALIGNED for like in likes.values()]]).tolist()
        if ends[-1] > len(self._bytes):
            self._bytes = np.empty(0, np.uint8)  # frees the old memory before the new is made
            memory, start = new_memory(ends[-1])
            self._bytes = np.frombuffer(memory, np.uint8, ends[-1], start)
        return {
            name: self._bytes[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
            for start, (name, like) in zip(ends, likes.items(), strict=False)
        }

    def copies(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return `arrays` with the same values."""
        out = self.arrays(values)
        pieces = []
        for name, value in values.items():
            target, source = out[name].reshape(-1), value.reshape(-1)
            step = max(1, _COPIED_AT_ONCE // value.itemsize)
            pieces += [
                (target[start : start + step], source[start : start + step]) for start in range(0, len(source), step)
            ]
        # One core alone does not use the bandwidth of memory.
        threads = max(1, min(_THREADS, len(cores() or (0,)), -(-len(self._bytes) // _COPIED_AT_ONCE)))
        with ThreadPoolExecutor(threads, "mpistrat-copy") as pool:  # starts no thread before it is used
            [*(pool.map if threads > 1 else map)(_copy, [pieces[i::threads] for i in range(threads)])]
        return out


def _copy(pieces: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in pieces:
        np.copyto(target, source)


Prepare = Callable[[SaveBuffer, threading.Event], Callable[[], None]]
_log = logging.getLogger(__name__)


class PendingSave:
    """A checkpoint that is being written. Begin one by `mpistrat.training.save_async`.

    Examples
    --------
    >>> import mpistrat, pathlib, tempfile
    >>> with mpistrat.MultiWorkerMirroredStrategy().scope():
    ...     v = mpistrat.Variable([1.0, 2.0], name="v")
    >>> folder = tempfile.TemporaryDirectory()
    >>> pending = mpistrat.training.save_async([v], pathlib.Path(folder.name) / "weights.h5")
    >>> pending.wait()
    >>> pending.done()
    True
    >>> folder.cleanup()
    """

    def __init__(self, topology: Topology, is_chief: bool, path: Path):
        self._topology, self._is_chief, self._path = topology, is_chief, path
        self._writing: Future[None] | None = None  # in a thread; the thread of the chief ends last
        self.lost = threading.Event()
        self._failed: Exception | None = None
        self._over = False  # whether all ranks know how it ended

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once: the same on every rank. Collective."""
        return self._over or bool(self._topology.broadcast_object(self._writing is None or self._writing.done()))

    def wait(self) -> None:
        """Wait until the file exists under its final name. The first call is collective, later ones are local.

        Raises
        ------
        OSError
            On every replica, if the file could not be written.
        """
        if not self._over:
            # A rank that does not call `wait` is reported here. The call below waits for disks, without a time limit.
            self._topology.barrier()
            failures = self._topology.all_gather_object(not self._is_chief and self._error() is not None, math.inf)
            others = [rank for rank, failed in enumerate(failures) if rank and failed]
            if others:
                # Rank 0's thread may wait for a report that these ranks could not write.
                self.lost.set()
            try:
                self._topology.on_first(self._raise_error)
                if others:  # after their part was written: it may not be on the disk
                    raise OSError(f"{self._path}: the part of rank {ranges(others)} was not brought to the disk")
            # The ranks are out of step. That says nothing of the file, so it is not kept as the result of the save.
            except MismatchError:
                raise
            except Exception as error:
                self._failed = error
            self._over = True
            _pending.pop(self, None)
        self._raise_error()

    def _raise_error(self) -> None:
        error = self._error()
        if error is not None:
            raise error

    def _begin(self, prepare: Callable[[], Callable[[], None]]) -> None:
        """Start a thread with the function that ``prepare`` returns. Keep an error until `wait` raises it."""
        try:
            write = prepare()
        except MismatchError:
            raise
        except Exception as error:
            self._failed = error
            return

        def write_staged() -> None:
            # Releases the GIL: the caller would get it back only after 5 ms, the switch interval of the interpreter.
            time.sleep(_HANDOVER_S)
            write()

        thread = ThreadPoolExecutor(1, "mpistrat-save")  # Python joins it at the end of the program
        self._writing = begin_call(thread, write_staged)
        thread.shutdown(wait=False)

    def _error(self) -> BaseException | None:
        """Wait for the end of this rank's part of the save, and return its error or None."""
        return self._failed or (None if self._writing is None else self._writing.exception())


_pending: dict[PendingSave, None] = {}  # in the order in which they began, which is the same on all ranks


def begin(topology: Topology, is_chief: bool, path: Path, prepare: Prepare | None) -> PendingSave:
    """Begin a save. Call `finish` first: no other save may be pending.

    ``prepare`` copies what this rank writes to the buffer, and returns the function that writes it. None for a rank
    that writes nothing. What rank 0's function raises is the error of all. The event is set on rank 0 if another
    rank's function raised.
    """
    program_end.register(program_end.EndStep.SAVES, _log_errors)
    buffer = topology.slot(SaveBuffer)
    buffer.count += 1
    pending = PendingSave(topology, is_chief, path)
    _pending[pending] = None
    if prepare is not None:
        pending._begin(partial(prepare, buffer, pending.lost))
    return pending


def finish(topology: Topology) -> None:
    """Wait for the pending save of these ranks, if there is one. Collective if so.

    Raise OSError on every replica if the file could not be written and no call has raised that yet.
    """
    for pending in [*_pending]:
        if pending._topology.slot(SaveBuffer) is topology.slot(SaveBuffer):
            pending.wait()


def finish_all() -> None:
    """Wait for the pending saves of all communicators whose ranks are still in step. Collective."""
    for pending in [*_pending]:
        if not pending._topology.lock.given_up:
            pending.wait()


def _log_errors() -> None:
    for pending in _pending:
        error = pending._error()
        if error is not None:
            _log.error("%s was not written, and the program did not wait for it: %s", pending._path, error)


# --- by all ranks ---------------------------------------------------------------


_PAGE = 4096
_MARKS = ".marks.tmp"  # the end of a second temporary file's name
_SAMPLED = 64  # an asynchronous save compares one page in so many
_MOST_NAMED = 3  # differing arrays in a message
_LONGEST_TEXT = 512  # characters of an error in a report, in JSON of up to 12 bytes each


def _begin_file(
    ranks: Topology, arrays: Mapping[str, NewArray], values: Mapping[str, Any], path: Path
) -> NewCheckpoint:
    """Return a file that all ranks write. Collective.

    Raise OSError on every rank if a directory is not seen by a rank with parts of its own.
    """
    from mpistrat.training.checkpoint.write import NewCheckpoint  # h5py

    seen = writers(ranks, path.parent)
    new = NewCheckpoint(arrays, values, path, ranks.rank, seen, ranks.size)
    blind = [rank for rank, parts in new.shares.items() if parts and rank not in seen]
    if blind:
        raise OSError(
            f"rank{'s' if len(blind) > 1 else ''} {ranges(blind)} cannot write to rank 0's files in {path.parent}, "
            "and each rank writes its own parts: choose a directory that all nodes share"
        )
    return new


def new_arrays(
    ranks: Topology, replicas: ReplicaGroup, own: Mapping[str, PerRank | ArrayBlock]
) -> tuple[dict[str, NewArray], dict[str, Any]]:
    """Return the own arrays of all ranks as arrays of a file, and the values of this rank. Collective.

    Raise ValueError on every rank if blocks do not fit together.
    """
    values: dict[str, Any] = {}
    report: dict[str, list[tuple[np.dtype, tuple[int, ...]]] | tuple[Any, ...]] = {}
    for name, value in own.items():
        if isinstance(value, ArrayBlock):
            boxes = tuple(Box(block.offset, block.shape) for block in value.blocks)
            values[name], report[name] = value.blocks, (value.dtype, value.shape, boxes)
        else:
            named = _own_names(name, value, ranks.rank, replicas)
            own_values = map(comparable, map(numpy_or_cupy, value.values))
            values.update(zip(named, own_values, strict=True))
            report[name] = tuple((key, values[key].dtype, tuple(values[key].shape)) for key in named)
    reports = ranks.all_gather_object(report)
    new: dict[str, NewArray] = {}
    for name, value in own.items():
        if not isinstance(value, ArrayBlock):
            for rank, of_rank in enumerate(reports):
                for key, dtype, shape in of_rank[name]:
                    new.setdefault(key, NewArray(dtype, shape, rank))
            continue
        dtype, shape, _ = reports[0][name]
        for rank, of_rank in enumerate(reports):
            if of_rank[name][:2] != (dtype, shape):
                raise ValueError(
                    f"{name!r}: the block of rank {rank} is of {of_rank[name][0]} with the global shape "
                    f"{of_rank[name][1]}, and that of rank 0 of {dtype} with {shape}"
                )
        of_ranks = tuple(of_rank[name][2] for of_rank in reports)
        require_cover(name, of_ranks, shape)
        new[name] = NewArray(dtype, shape, None, of_ranks)
    return new, values


def _own_names(name: str, own: PerRank, rank: int, replicas: ReplicaGroup) -> list[str]:
    """Return the names in the file of this rank's own arrays."""
    first = replicas.first if own.by_replica else rank
    return [f"{name}/{first + i}" for i in range(len(own.values))]


def read_own(
    ranks: Topology, replicas: ReplicaGroup, own: Mapping[str, PerRank | ArrayBlock], path: Path
) -> list[tuple[Any, np.ndarray]]:
    """Return the arrays of this rank's own parts, and the values that it reads for them. Collective with parts."""
    targets: list[tuple[Any, np.ndarray]] = []

    def read_mine() -> None:
        from mpistrat.training.checkpoint.read import read, require_parts

        def new(target: Any) -> np.ndarray:
            dtype, shape = dtype_and_shape(target)
            targets.append((target, np.empty(shape, dtype.newbyteorder("="))))
            return targets[-1][1]

        values: dict[str, np.ndarray] = {}
        boxes: list[tuple[str, Box, np.ndarray]] = []
        for name, value in own.items():
            if isinstance(value, ArrayBlock):
                boxes += [(name, Box(block.offset, value.shape), new(block.array)) for block in value.blocks]
            else:
                count = replicas.size if value.by_replica else ranks.size
                require_parts(path, name, count, value.by_replica)
                values.update(zip(_own_names(name, value, ranks.rank, replicas), map(new, value.values), strict=True))
        read(values, path, boxes)

    if own:
        ranks.on_all_ranks(read_mine)
    return targets


def is_one_file(ranks: Topology, path: Path) -> bool:
    """Return whether all ranks see one file, and not one each on disks of their own. Collective."""
    identity = None
    with contextlib.suppress(OSError):
        status = path.stat()
        # Without st_dev, which differs between the nodes that mount one network file system.
        identity = status.st_ino, status.st_size, status.st_mtime_ns
    answers = {*ranks.all_gather_object(identity)}
    return len(answers) == 1 and None not in answers


def is_small(ranks: Topology, arrays: Mapping[str, NewArray]) -> bool:
    """Return whether rank 0 alone writes arrays that are the same on all ranks."""
    return ranks.size == 1 or sum(array.nbytes for array in arrays.values()) <= ranks.limits.save_alone_bytes


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
    digests: dict[str, int] = {}
    with contextlib.closing(_begin_file(ranks, arrays, values, path)) as new:

        def make(temporary: Path) -> list[int]:
            new.make(temporary)
            return new.lay_out()

        def write(temporary: Path, offsets: list[int]) -> tuple[list[int], int]:
            checksums, of_all = new.write(temporary, offsets, compared=compared)
            digests.update({name: digest(np.array(numbers, np.uint64)) for name, numbers in of_all.items()})
            return checksums, digest_of_all(digests.values())

        write_by_all(
            ranks,
            "save",
            path,
            True,
            make,
            write,
            finish=lambda temporary, results: new.finish(temporary, [checksums for checksums, _ in results]),
            check=lambda results: _require_same(ranks, digests, [of_rank for _, of_rank in results]),
        )


def refuse_differing(ranks: Topology, compared: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError on every rank if an array is not the same on all. Collective. Takes 10 to 30 ms for 100 MB."""
    digests = {name: digest(as_bytes(value).data) for name, value in compared.items()}
    _require_same(ranks, digests, ranks.all_gather_object(digest_of_all(digests.values())))


def sampled(value: np.ndarray, number: int) -> np.ndarray:
    """Return digests of one page in `_SAMPLED`, drawn by a number."""
    data = as_bytes(value).data
    pages = max(1, min(_SAMPLED, -(-len(data) // _PAGE)))
    # Drawn, not number % pages: two states that are saved in turn would each compare half of the pages only.
    first = digest(struct.pack("<q", number)) % pages * _PAGE  # 1 us; a NumPy generator takes 15 us
    starts = range(first, len(data), _SAMPLED * _PAGE)
    return np.array([digest(data[start : start + _PAGE]) for start in starts], np.uint64)


def _require_same(ranks: Topology, digests: Mapping[str, int], of_all: Sequence[int]) -> None:
    # One digest of all arrays is compared first: the names are gathered only for the message.
    if len({*of_all}) == 1:
        return
    reports = ranks.all_gather_object([*digests.values()])
    differ = [[own != first for own, first in zip(of_rank, reports[0], strict=True)] for of_rank in reports]
    named = [name for name, *of_ranks in zip(digests, *differ, strict=True) if any(of_ranks)]
    differing = [rank for rank, flags in enumerate(differ) if any(flags)]
    shown = few([*map(repr, named)], _MOST_NAMED)
    raise ValueError(
        f"{len(named)} of {len(digests)} arrays ({shown}) are not the same on all ranks: those of rank"
        f"{'s' if len(differing) > 1 else ''} {ranges(differing)} differ from rank 0's, and one file has one value of "
        'each; fix: gather the parts of the ranks first, or save(..., differing="chief") to keep those of rank 0'
    )


# --- in a thread of each rank, without MPI ---------------------------------------------------------------


def prepare_alone(
    values: Mapping[str, np.ndarray], path: Path, buffer: SaveBuffer | None = None, lost: threading.Event | None = None
) -> Callable[[], None]:
    """Copy values to a buffer, if there is one, and return the function by which rank 0 alone writes them."""
    from mpistrat.training.checkpoint.write import write  # the program may be at its end in the thread

    return partial(write, buffer.copies(values) if buffer is not None else values, path)


def prepare_by_ranks(
    ranks: Topology,
    arrays: Mapping[str, NewArray],
    values: Mapping[str, Any],
    path: Path,
    buffer: SaveBuffer,
    lost: threading.Event,
) -> Callable[[], None]:
    """Copy this rank's share, and return the function that writes the copy. Collective.

    The function makes no MPI calls. On rank 0 it gives the file its name, when all ranks have written, or raises what
    any of them raised. In a second temporary file rank 0 writes where the arrays lie, and the others write their
    checksums. ``lost`` is set if a rank could not write its report: rank 0 then waits no longer.
    """
    new, rank = _begin_file(ranks, arrays, values, path), ranks.rank
    most = max(map(len, new.shares.values()))
    # A 64-bit number takes up to 20 digits and ", " in JSON. Length and digest before it fit in the 64 bytes.
    pages = -(-(64 + max(12 * _LONGEST_TEXT, 22 * most, 22 * len(arrays))) // _PAGE)
    slot = pages * _PAGE  # of one rank, so that two nodes do not write to one page

    ended = contextlib.ExitStack()  # rank 0's files

    def make() -> str:
        with contextlib.ExitStack() as stack:
            stack.callback(new.close)
            temporary = stack.enter_context(appearing(path, replace=True))
            new.make(temporary)
            marks = temporary.with_suffix(_MARKS)
            stack.callback(marks.unlink, missing_ok=True)
            # Written now: the disk may be full when a rank is to report just that.
            marks.write_bytes(bytes(slot * ranks.size))
            ended.enter_context(stack.pop_all())
        return temporary.name

    temporary = path.with_name(ranks.on_first(make, operation("save_async: make the file")))
    marks = temporary.with_suffix(_MARKS)
    copies: dict[str, np.ndarray] = {}
    failed: Exception | None = None
    try:
        copies = buffer.copies(new.on_host())
    except Exception as error:  # raised in the thread: rank 0's thread waits for the report
        failed = error

    def write(offsets: list[int]) -> list[int]:
        if failed is not None:
            raise failed
        return new.write(temporary, offsets, copies)[0]

    def write_part() -> None:
        if not new.parts:  # it may not see the file
            return
        try:
            write_report(marks, slot * rank, write(await_report(marks, 0, 0, lost)))
        except Exception as error:
            write_report(marks, slot * rank, [getattr(error, "errno", None) or 0, str(error)[:_LONGEST_TEXT]])

    def write_and_finish() -> None:
        with ended:
            offsets = new.lay_out()
            write_report(marks, 0, offsets)
            checksums = write(offsets)
            # A generator: `finish` waits for a rank only when it comes to its checksums.
            others = (await_report(marks, slot * i, i, lost) if new.shares[i] else [] for i in range(1, ranks.size))
            new.finish(temporary, [checksums, *others])

    return write_part if rank else write_and_finish
