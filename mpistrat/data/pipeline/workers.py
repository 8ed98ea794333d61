"""Worker processes for the functions given to ``map(fn, workers=...)``.

They are started by this file, not by ``multiprocessing``: they do not import the program, are no ranks, and end with
their rank, however it ends. See `worker_process` for their side.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, repeat, zip_longest
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

from mpistrat.data.pipeline import worker_process
from mpistrat.data.rows import elements
from mpistrat.launch import launch
from mpistrat.messages.pickling import Failure, pack, packed_function
from mpistrat.process import children, private_file
from mpistrat.runtime import affinity

# Libraries take one thread, as there are workers for all cores. Modules of the program may import MPI without a rank.
_ENVIRONMENT = dict.fromkeys(affinity.THREADS, "1") | {"MPI4PY_RC_INITIALIZE": "0"}
_LEAST = 200e-6  # seconds of a call from which on "auto" takes processes
_MEASURED = 4  # calls
_SLOTS = 2  # of a worker
_AT_ONCE = 2e-3  # seconds of calls that a worker gets in one message


class _Worker:
    """A worker process. It has a slot for the request that it works on, and one for the next."""

    def __init__(self, memory: int, number: int) -> None:
        self.slots = [_SLOTS * number + slot for slot in range(_SLOTS)]  # that are free
        alive, self._alive = os.pipe()
        self.connection, theirs = Pipe()
        descriptors = theirs.fileno(), alive, memory
        self.process = subprocess.Popen(
            children.running(worker_process.__name__, *map(str, descriptors)),
            stdin=subprocess.DEVNULL,
            env=launch.without_job(os.environ) | _ENVIRONMENT,
            pass_fds=descriptors,
        )
        theirs.close()
        os.close(alive)

    def send(self, message: Any) -> None:
        with suppress(OSError):  # the process has ended, which `receive` reports
            self.connection.send(message)

    def receive(self) -> Any:
        """Return an answer. Raise RuntimeError if the process has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            status = self.process.wait()
        how = f"ended with status {status}"
        if status < 0:
            how = f"was killed by signal {-status} ({signal.Signals(-status).name})"
        raise RuntimeError(
            f"worker process {self.process.pid} of map() {how}: if the system killed it for its memory, take fewer "
            "workers; if it printed nothing, map() without workers shows other causes"
        )

    def close(self) -> None:
        """End the process, and those that it has started."""
        os.close(self._alive)
        with suppress(ProcessLookupError):  # a worker that was killed leaves its group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may have no group yet
        self.process.wait()
        self.connection.close()


def _close(workers: list[_Worker], memory: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves them to its parent
        for worker in workers:
            worker.close()
        os.close(memory)
    workers.clear()


class Workers:
    """Processes that call a function of ``map``. They start with the first rows, and end with this object.

    For "auto" there is one for each core of this rank. The function is called in this process, and no other starts,
    while a call takes less than `_LEAST`, or if the rank has one core. Raise TypeError if it cannot be pickled.
    """

    def __init__(self, fn: Callable[..., Any], seed: int | None, number: Any):
        packed_function(fn)
        self._arguments = fn, seed, number
        self._times: deque[float] | None = None
        self.count, self.chooses = number, number == "auto"
        if self.chooses:
            self._times = deque(maxlen=_MEASURED)
            cores = affinity.cores_of_machine()
            self.count = max(1, min(len(affinity.cores() or range(cores)), cores // launch.ranks_here(os.environ)))
        self._seconds = _AT_ONCE  # of a call
        self._forget()

    def __reduce__(self) -> Any:
        return Workers, self._arguments

    def _forget(self) -> None:
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._workers: list[_Worker] = []
        self._end: Callable[[], object] = bool

    def mapped(self, rows: Sequence[Any], row_ids: Sequence[tuple[int, int]]) -> list[Any]:
        """Return rows after the function, in order. Raise the error of the first row that fails."""
        results = [] if self._times is None else self._map_here(self._times, rows, row_ids)
        if self._owner != os.getpid():
            self._forget()
        if len(results) < len(rows):
            with self._lock:  # several datasets may have one map
                try:
                    if not self._workers:
                        self._start()
                    results += self._map_by_workers([*zip_longest(rows, row_ids)], len(results))
                except BaseException:
                    self._end()  # a worker may still have rows
                    raise
        return results

    def _map_here(self, times: deque[float], rows: Sequence[Any], row_ids: Sequence[Any]) -> list[Any]:
        """Return rows after the function, called here, up to the row at which it turns out to be slow."""
        fn, seed, _ = self._arguments
        results = []
        for row, row_id in zip(rows, row_ids or repeat(None), strict=False):
            began = time.perf_counter()
            results.append(elements.mapped(row, [elements.seeded(fn, seed, row_id)]))
            times.append(time.perf_counter() - began)
            # Two long calls do not count: one may load a module, and the system may interrupt any.
            if times[-1] >= _LEAST and len(times) == _MEASURED and sorted(times)[1] >= _LEAST and self.count > 1:
                self._times = None
                break
        return results

    def _start(self) -> None:
        memory, _ = private_file.create_in_memory()
        self._memory, self._workers = memory, []
        # Also at the end of the program, if a thread still waits for them: it gets an error.
        self._end = weakref.finalize(self, _close, self._workers, memory, self._owner)
        fn, seed, _ = self._arguments
        packed, _ = pack((fn, seed), copy=True)
        for number in range(self.count):
            self._workers.append(_Worker(memory, number))
            self._workers[-1].send((sys.path, sys.argv, packed))

    def _map_by_workers(self, rows: Sequence[Any], first: int) -> list[Any]:
        """Return rows from ``first`` on after the function."""
        least = max(1, math.ceil(min(_AT_ONCE / self._seconds, (len(rows) - first) / self.count)))
        next_row = first
        results: dict[int, list[Any]] = {}
        failures: dict[int, Failure] = {}
        free = _SLOTS * self._workers  # the next request is there when one has ended
        while free:
            for worker in free:
                if next_row < len(rows) and not failures:
                    # Many at first, few at last: all workers end at nearly the same time.
                    size = max(least, (len(rows) - next_row) // (2 * self.count))
                    slot = worker.slots.pop()
                    sizes = worker_process.put(self._memory, slot, pack(rows[next_row : next_row + size])[0])
                    worker.send((slot, next_row, sizes))
                    next_row += size
            busy: dict[Any, _Worker] = {w.connection: w for w in self._workers if len(w.slots) < _SLOTS}
            free = [busy[connection] for connection in wait([*busy])] if busy else []
            for worker in free:
                slot, start, sizes, seconds, failure = worker.receive()
                worker.slots.append(slot)
                results[start] = worker_process.get(self._memory, slot, sizes)
                if failure is None:
                    self._seconds = seconds / len(results[start])
                else:
                    failures[start + len(results[start])] = failure
        if failures:
            row = min(failures)
            row_id = rows[row][1]
            which = "row {} of the source, epoch {}".format(*row_id) if row_id else f"row {row} of {len(rows)}"
            raise failures[row]._replace(where=f"{failures[row].where}, {which}").error()
        return [*chain.from_iterable(results[start] for start in sorted(results))]
