"""The program of a worker process, which calls functions given to ``map``, and the frames by which it gets rows.

A frame is a pickled object in a file in memory, which a rank shares with its workers. Each worker has slots of its own
in the file. Messages on its connection only tell where a frame lies, so neither side waits for the other to read.

A worker lives in a process group of its own, with the processes that the functions start. The group ends with the rank:
the rank has the other end of a pipe open, and the system closes it however the rank ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any

from mpistrat.process.files import read_all, write_all

_SLOT = 1 << 36  # bytes; the file has holes, so that a frame takes the memory of its own bytes
_IGNORED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def put(memory: int, slot: int, packed: Sequence[Any]) -> list[int]:
    """Write an object that is ``Packed`` into a slot. Return the bytes of its parts."""
    stream, buffers = packed
    parts = [memoryview(part) for part in (stream, *buffers)]
    sizes = [part.nbytes for part in parts]
    for part, end in zip(parts, accumulate(sizes), strict=True):
        write_all(memory, part, slot * _SLOT + end - part.nbytes)
    return sizes


def get(memory: int, slot: int, sizes: Sequence[int]) -> Any:
    """Return the object of a slot. Its arrays have memory of their own: the slot is used again."""
    offset, parts = slot * _SLOT, [*map(bytearray, sizes)]
    for part in parts:
        read_all(memory, memoryview(part), offset)
        offset += len(part)
    return pickle.loads(parts[0], buffers=parts[1:])


def main(connection: Connection, alive: int, memory: int) -> None:
    """Call functions for rows until the rank ends."""
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_rank, args=(alive,), daemon=True).start()
    if hasattr(fcntl, "F_SETSIG"):
        # Linux sends the signal itself. A function in C that keeps the GIL would also keep the thread from running.
        # Not PR_SET_PDEATHSIG, which is sent when the thread of the rank ends that has started this process.
        fcntl.fcntl(alive, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(alive, fcntl.F_SETFL, os.O_ASYNC)
    for name in _IGNORED_SIGNALS:  # a launcher or a scheduler sends them to all processes of a rank, which may go on
        signal.signal(getattr(signal, name), lambda *_: None)
    for descriptor in (connection.fileno(), alive, memory):
        os.set_inheritable(descriptor, False)
    with contextlib.suppress(EOFError, ConnectionError):
        _serve(connection, memory)
    os._exit(0)  # threads of the functions must not keep the process


def _end_with_rank(alive: int) -> None:
    os.read(alive, 1)
    os.killpg(0, signal.SIGKILL)


def _serve(connection: Connection, memory: int) -> None:
    # Late imports: they take 0.1 s, in which the rank may end.
    from mpistrat.data.rows import elements
    from mpistrat.messages import pickling
    from mpistrat.process import mpi
    from mpistrat.runtime.agreement import collective_lock

    mpi.refuse_start("the workers of map()")
    collective_lock.forbidden_threads[threading.get_ident()] = collective_lock.MAKES_A_BATCH
    sys.path[:], sys.argv[:], packed = connection.recv()  # modules are found as the program finds them
    unpacked: Any = None
    while True:
        slot, start, sizes = connection.recv()
        results: list[Any] = []
        failure = None
        began = time.perf_counter()
        try:
            fn, seed = unpacked = unpacked or pickling.unpack(packed)
            for row, row_id in get(memory, slot, sizes):
                result = elements.mapped(row, [elements.seeded(fn, seed, row_id)])
                if not pickling.is_plain(result):
                    pickling.pack(result)  # raises for this row
                results.append(result)
        except BaseException as error:
            failure = pickling.failure_of(error, f"worker process {os.getpid()} of map()")
        took = time.perf_counter() - began
        print(end="", flush=True)  # what the function has printed
        connection.send((slot, start, put(memory, slot, pickling.pack(results)[0]), took, failure))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), *map(int, sys.argv[2:]))
