"""A program that tests which operations of the MPI library work on GPU memory.

It is a program of its own because an operation may crash it:

mpistrat run -n 2 -m mpistrat.cli.check.gpu_probe
"""

from __future__ import annotations

import sys
from typing import Any

_ELEMENTS = (5, 100_003)  # one message, and several messages


def main() -> int:
    """Test each operation, print and store the result. Return exit status 1 unless all of them work."""
    from mpistrat.cluster_resolver.ranks.own_device import own_device
    from mpistrat.collectives.gpu import verdicts as gpu_verdicts
    from mpistrat.runtime.device import cupy_for
    from mpistrat.runtime.process import mpi
    from mpistrat.runtime.topology import Topology

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
    key: list[Any] = gpu_verdicts.key(topology, device.index)
    before: dict[str, str] = topology.broadcast_object(gpu_verdicts.read(key))
    verdicts: dict[str, str] = {}
    # The operation that crashed the last run goes last: otherwise those after it would never be tested.
    for operation in sorted(
        gpu_verdicts.OPERATIONS, key=lambda name: before.get(name) == gpu_verdicts.TRYING
    ):
        if topology.rank == 0:  # before the operation, which may crash the program
            gpu_verdicts.write(key, {**gpu_verdicts.read(key), operation: gpu_verdicts.TRYING})
        topology.barrier()
        verdicts[operation] = _try(topology, cupy_for("the probe"), operation)
        if topology.rank == 0:
            gpu_verdicts.write(key, {**gpu_verdicts.read(key), **verdicts})
            print(f"{operation} on the memory of GPUs {verdicts[operation]}")
    if topology.rank == 0:
        print(f"kept in {gpu_verdicts.path_of(key)}")
    return 0 if all(verdict == gpu_verdicts.WORKS for verdict in verdicts.values()) else 1


def _try(topology: Any, cupy: Any, operation: str) -> str:
    import numpy as np

    from mpistrat.collectives.gpu import verdicts as gpu_verdicts

    for elements in _ELEMENTS:
        error = ""
        try:
            got, want = _TRIALS[operation](topology, cupy, elements)
        except Exception as problem:  # any error of the library
            error = f"fails: {problem}"
        if not error and not np.array_equal(cupy.asnumpy(got), want):
            error = "gives wrong values"
        told = [text for text in topology.all_gather_object(error) if text]
        if told:
            return str(told[0])
    return gpu_verdicts.WORKS


def _values(rank: int, elements: int, to: int = 0) -> Any:
    import numpy as np

    return np.arange(elements, dtype=np.float32) + 1000 * rank + to


def _all_to_all(topology: Any, cupy: Any, elements: int) -> tuple[Any, Any]:
    import numpy as np

    from mpistrat.collectives.gpu import pointers as gpu_pointers

    size, rank = topology.size, topology.rank
    send = cupy.asarray(np.concatenate([_values(rank, elements, to) for to in range(size)]))
    receive = cupy.zeros(size * elements, np.float32)
    gpu_pointers.all_to_all(topology, send, receive)
    return receive, np.concatenate([_values(source, elements, rank) for source in range(size)])


def _all_gather(topology: Any, cupy: Any, elements: int) -> tuple[Any, Any]:
    import numpy as np

    from mpistrat.collectives.gpu import pointers as gpu_pointers

    receive = cupy.zeros(topology.size * elements, np.float32)
    gpu_pointers.all_gather(topology, cupy.asarray(_values(topology.rank, elements)), receive)
    return receive, np.concatenate([_values(source, elements) for source in range(topology.size)])


def _all_gather_uneven(topology: Any, cupy: Any, elements: int) -> tuple[Any, Any]:
    import numpy as np

    from mpistrat.collectives.gpu import pointers as gpu_pointers

    counts = [elements + rank if rank % 3 else 0 for rank in range(topology.size)]
    receive = cupy.zeros(sum(counts), np.float32)
    send = cupy.asarray(_values(topology.rank, counts[topology.rank]))
    gpu_pointers.all_gather_uneven(topology, send, receive, counts)
    return receive, np.concatenate([_values(source, count) for source, count in enumerate(counts)])


def _broadcast(topology: Any, cupy: Any, elements: int) -> tuple[Any, Any]:
    from mpistrat.collectives.gpu import pointers as gpu_pointers

    root = topology.size - 1
    data = cupy.asarray(_values(topology.rank, elements))
    gpu_pointers.broadcast(topology, data, root)
    return data, _values(root, elements)


_TRIALS = {
    "Alltoall": _all_to_all,
    "Allgather": _all_gather,
    "Allgatherv": _all_gather_uneven,
    "Bcast": _broadcast,
}


if __name__ == "__main__":
    sys.exit(main())
