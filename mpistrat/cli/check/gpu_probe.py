"""A program that tests which operations of the MPI library work on GPU memory.

It is a program of its own because an operation may crash it:

mpistrat run -n 2 -m mpistrat.cli.check.gpu_probe
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import numpy as np

from mpistrat.arrays.device import cupy_for
from mpistrat.cluster_resolver.own_device import own_device
from mpistrat.collectives.gpu import pointers
from mpistrat.process import mpi
from mpistrat.runtime.topology import Topology

_ELEMENTS = (5, 100_003, None)  # one message, several messages, and a whole piece, as the collectives send


def main(limit: float = 600) -> int:
    """Test each operation, print and store the result. Return exit status 1 unless all of them work.

    End the process with status 1 after ``limit`` seconds: a library may wait forever, and a scheduler for the job.
    """
    text = f"the probe did not end within {limit:g} s and was stopped"
    watch = threading.Timer(limit, lambda: (print(text, flush=True), os._exit(1)))
    watch.daemon = True
    watch.start()
    try:
        return _main()
    finally:
        watch.cancel()


def _main() -> int:
    topology = Topology.of(mpi.start().COMM_WORLD)
    missing = "one rank cannot exchange data: start at least two ranks" if topology.size == 1 else ""
    try:
        device = own_device(topology, "cuda").use()
    except RuntimeError as error:
        missing = str(error)
    if missing:
        if topology.rank == 0:
            print(missing)
        return 1
    key: list[Any] = pointers.key_of(topology, device.index)
    before: dict[str, str] = topology.broadcast_object(pointers.read_verdicts(key))
    verdicts: dict[str, str] = {}
    # The operation that crashed the last run goes last: otherwise those after it would never be tested.
    for operation in sorted(pointers.OPERATIONS, key=lambda name: before.get(name) == pointers.TRYING):
        if topology.rank == 0:  # before the operation, which may crash the program
            pointers.write_verdicts(key, {**pointers.read_verdicts(key), operation: pointers.TRYING})
        topology.barrier()
        verdicts[operation] = _try(topology, cupy_for("the probe"), operation)
        if topology.rank == 0:
            pointers.write_verdicts(key, {**pointers.read_verdicts(key), **verdicts})
            print(f"{operation} on the memory of GPUs {verdicts[operation]}")
    if topology.rank == 0:
        print(f"kept in {pointers.path_of_verdicts(key)}")
    return 0 if all(verdict == pointers.WORKS for verdict in verdicts.values()) else 1


def _try(topology: Topology, cupy: Any, operation: str) -> str:
    for elements in _ELEMENTS:
        elements = elements or pointers.PIECE_BYTES // 4 // topology.size
        error = ""
        try:
            got, want = _TRIALS[operation](topology, cupy, elements)
        except Exception as problem:  # any error of the library
            error = f"fails: {problem}"
        if not error and not np.array_equal(cupy.asnumpy(got), want):
            error = "gives wrong values"
        errors = [text for text in topology.all_gather_object(error) if text]
        if errors:
            return str(errors[0])
    return pointers.WORKS


def _values(rank: int, elements: int, to: int = 0) -> Any:
    return np.arange(elements, dtype=np.float32) + 1000 * rank + to


def _all_to_all(topology: Topology, cupy: Any, elements: int) -> tuple[Any, Any]:
    size, rank = topology.size, topology.rank
    send = cupy.asarray(np.concatenate([_values(rank, elements, to) for to in range(size)]))
    receive = cupy.zeros(size * elements, np.float32)
    pointers.all_to_all(topology, send, receive)
    return receive, np.concatenate([_values(source, elements, rank) for source in range(size)])


def _all_gather(topology: Topology, cupy: Any, elements: int) -> tuple[Any, Any]:
    receive = cupy.zeros(topology.size * elements, np.float32)
    pointers.all_gather(topology, cupy.asarray(_values(topology.rank, elements)), receive)
    return receive, np.concatenate([_values(source, elements) for source in range(topology.size)])


def _all_gather_uneven(topology: Topology, cupy: Any, elements: int) -> tuple[Any, Any]:
    counts = [elements + rank if rank % 3 else 0 for rank in range(topology.size)]
    receive = cupy.zeros(sum(counts), np.float32)
    send = cupy.asarray(_values(topology.rank, counts[topology.rank]))
    pointers.all_gather_uneven(topology, send, receive, counts)
    return receive, np.concatenate([_values(source, count) for source, count in enumerate(counts)])


def _broadcast(topology: Topology, cupy: Any, elements: int) -> tuple[Any, Any]:
    root, elements = topology.size - 1, topology.size * elements
    data = cupy.asarray(_values(topology.rank, elements))
    pointers.broadcast(topology, data, root)
    return data, _values(root, elements)


_TRIALS = {"Alltoall": _all_to_all, "Allgather": _all_gather, "Allgatherv": _all_gather_uneven, "Bcast": _broadcast}


if __name__ == "__main__":
    sys.exit(main())
