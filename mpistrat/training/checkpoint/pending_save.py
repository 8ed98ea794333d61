"""Saves that run while the program computes."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mpistrat.process import program_end
from mpistrat.process.program_end import EndStep
from mpistrat.process.ranges import ranges
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.runtime.topology import Key, Topology
from mpistrat.training.checkpoint.buffers import SaveBuffer

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
        self._thread: threading.Thread | None = None  # that of the chief ends last
        self.lost = threading.Event()
        self._failed: Exception | None = None
        self._over = False  # and all ranks know how it ended

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once: the same on every rank. Collective."""
        if self._over:
            return True
        return bool(self._topology.broadcast_object(self._thread is None or not self._thread.is_alive()))

    def wait(self) -> None:
        """Wait until the file exists under its final name. The first call is collective, later ones are local.

        Raises
        ------
        OSError
            On every replica, if the file could not be written.
        """
        if not self._over:
            self._topology.barrier()
            if not self._is_chief and self._thread is not None:
                self._thread.join()
            told = self._topology.all_gather_object(self._failed is not None, math.inf)
            others = [rank for rank, failed in enumerate(told) if rank and failed]
            if others:
                self.lost.set()
            try:
                self._topology.on_first(self._finish)
                if others:  # after their part was written: it may not be on the disk
                    raise OSError(f"{self._path}: the part of rank {ranges(others)} was not brought to the disk")
            except MismatchError:
                raise
            except Exception as error:
                self._failed = error
            self._over = True
            _forget(self._topology, self)
        self._raise_if_failed()

    @property
    def given_up(self) -> bool:
        """Whether the ranks are not in step any more, so that they cannot wait for each other."""
        return bool(self._topology.lock.given_up)

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _begin(self, prepare: Callable[[], Callable[[], None]]) -> None:
        """Start a thread with the function that ``prepare`` returns. Keep an error until `wait` raises it."""
        try:
            write = prepare()
        except MismatchError:
            raise
        except Exception as error:
            self._failed = error
            return
        may_begin = threading.Event()

        def write_staged() -> None:
            may_begin.wait()  # or who starts it gets the interpreter back after 5 ms
            try:
                write()
            except Exception as error:
                self._failed = error

        # No daemon: the end of the program waits for it.
        thread = threading.Thread(target=write_staged, name="mpistrat-save")
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads: write now, as other ranks wait for what this one tells
            may_begin.set()
            write_staged()
            return
        self._thread = thread
        may_begin.set()

    def _tell_at_exit(self) -> None:
        if self._failed is not None and not self._over:
            _log.error("%s was not written, and the program did not wait for it: %s", self._path, self._failed)


class _Saves:
    """The asynchronous saves of one communicator. They run one at a time and share a buffer."""

    def __init__(self) -> None:
        self.buffer, self.count = SaveBuffer(), 0
        self.last: PendingSave | None = None


_saves: weakref.WeakKeyDictionary[Key, _Saves] = weakref.WeakKeyDictionary()


def begin(topology: Topology, is_chief: bool, path: Path, prepare: Prepare | None) -> PendingSave:
    """Begin a save. Call `finish` first: no other save may be pending.

    ``prepare`` copies what this rank writes to the buffer, and returns the function that writes it. None for a rank
    that writes nothing. What rank 0's function raises is the error of all. The event is set on rank 0 if another
    rank's function raised.
    """
    program_end.register(EndStep.SAVES, _tell_at_exit)
    saves = _saves.setdefault(topology.key, _Saves())
    saves.count += 1
    saves.last = pending = PendingSave(topology, is_chief, path)
    if prepare is not None:
        pending._begin(partial(prepare, saves.buffer, pending.lost))
    return pending


def count(topology: Topology) -> int:
    """Return how many saves have begun: the same on all ranks."""
    return _saves[topology.key].count if topology.key in _saves else 0


def finish(topology: Topology) -> None:
    """Wait for the pending save of this communicator, if there is one. Collective if so.

    Raise OSError on every replica if the file could not be written and no call has raised that yet.
    """
    saves = _saves.get(topology.key)
    if saves is not None and saves.last is not None:
        saves.last.wait()


def _forget(topology: Topology, pending: PendingSave) -> None:
    """Drop the reference to a finished save, which keeps the communicator alive."""
    saves = _saves.get(topology.key)
    if saves is not None and saves.last is pending:
        saves.last = None


def finish_all() -> None:
    """Wait for the pending saves of all communicators whose ranks are still in step. Collective."""
    for saves in list(_saves.values()):
        if saves.last is not None and not saves.last.given_up:
            saves.last.wait()


def _tell_at_exit() -> None:
    for saves in list(_saves.values()):
        if saves.last is not None:
            saves.last._tell_at_exit()
