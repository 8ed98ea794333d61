"""Saves that run while the program computes, and the memory that they use again."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from mpistrat.memory.buffer_pool import new_memory
from mpistrat.process import program_end
from mpistrat.process.program_end import EndStep
from mpistrat.process.waiting import begin_call
from mpistrat.representation import ranges
from mpistrat.runtime.affinity import cores
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.runtime.topology import Slot, Topology

_ALIGNED = 64  # bytes: no two arrays share a cache line
_PIECE = 2 << 20  # bytes that a thread copies at once
_THREADS = 4
_AWAY = 0.0002  # seconds


class SaveBuffer:
    """A buffer that holds arrays of any shapes and dtypes, and is used again for the next ones.

    It grows when needed, and is never freed before the object.

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
        self._bytes = np.empty(0, np.uint8)

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
            step = max(1, _PIECE // value.itemsize)
            pieces += [
                (target[start : start + step], source[start : start + step]) for start in range(0, len(source), step)
            ]
        # One core alone does not use the bandwidth of memory.
        threads = min(_THREADS, len(cores() or (0,)), -(-len(self._bytes) // _PIECE))
        if threads < 2:
            _copy(pieces)
            return out
        with ThreadPoolExecutor(threads - 1, "mpistrat-copy") as pool:
            others = [pool.submit(_copy, pieces[i::threads]) for i in range(1, threads)]
            _copy(pieces[::threads])
            for other in others:
                other.result()
        return out


def _copy(pieces: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in pieces:
        np.copyto(target, source)


class Saves(Slot):
    """What the asynchronous saves of some ranks share: they run one at a time. ``count`` is how many have begun."""

    def __init__(self) -> None:
        self.buffer, self.count = SaveBuffer(), 0


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
        self._writing: Future[None] | None = None  # in a thread; that of the chief ends last
        self.lost = threading.Event()
        self._failed: Exception | None = None
        self._over = False  # and all ranks know how it ended

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once: the same on every rank. Collective."""
        if self._over:
            return True
        return bool(self._topology.broadcast_object(self._writing is None or self._writing.done()))

    def wait(self) -> None:
        """Wait until the file exists under its final name. The first call is collective, later ones are local.

        Raises
        ------
        OSError
            On every replica, if the file could not be written.
        """
        if not self._over:
            self._topology.barrier()
            told = self._topology.all_gather_object(not self._is_chief and self._error() is not None, math.inf)
            others = [rank for rank, failed in enumerate(told) if rank and failed]
            if others:
                self.lost.set()
            try:
                self._topology.on_first(self._raise_error)
                if others:  # after their part was written: it may not be on the disk
                    raise OSError(f"{self._path}: the part of rank {ranges(others)} was not brought to the disk")
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
            time.sleep(_AWAY)  # or who starts it gets the interpreter back after 5 ms
            write()

        thread = ThreadPoolExecutor(1, "mpistrat-save")  # the end of the program waits for it
        self._writing = begin_call(thread, write_staged)
        thread.shutdown(wait=False)

    def _error(self) -> BaseException | None:
        """Return what this rank's part of the save raised. Wait for its end."""
        return self._failed or (None if self._writing is None else self._writing.exception())


_pending: dict[PendingSave, None] = {}  # in the order in which they began, which is the same on all ranks


def begin(topology: Topology, is_chief: bool, path: Path, prepare: Prepare | None) -> PendingSave:
    """Begin a save. Call `finish` first: no other save may be pending.

    ``prepare`` copies what this rank writes to the buffer, and returns the function that writes it. None for a rank
    that writes nothing. What rank 0's function raises is the error of all. The event is set on rank 0 if another
    rank's function raised.
    """
    program_end.register(EndStep.SAVES, _log_errors)
    saves = topology.slot(Saves)
    saves.count += 1
    pending = PendingSave(topology, is_chief, path)
    _pending[pending] = None
    if prepare is not None:
        pending._begin(partial(prepare, saves.buffer, pending.lost))
    return pending


def finish(topology: Topology) -> None:
    """Wait for the pending save of these ranks, if there is one. Collective if so.

    Raise OSError on every replica if the file could not be written and no call has raised that yet.
    """
    for each in [*_pending]:
        if each._topology.slot(Saves) is topology.slot(Saves):
            each.wait()


def finish_all() -> None:
    """Wait for the pending saves of all communicators whose ranks are still in step. Collective."""
    for each in [*_pending]:
        if not each._topology.lock.given_up:
            each.wait()


def _log_errors() -> None:
    for each in _pending:
        error = each._error()
        if error is not None:
            _log.error("%s was not written, and the program did not wait for it: %s", each._path, error)
