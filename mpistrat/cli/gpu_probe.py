"""Tries which operations of the MPI library work on the memory of GPUs: a program of its own, for one may end it.

mpistrat run -n 2 -m mpistrat.cli.gpu_probe
"""

from __future__ import annotations

import sys
from typing import Any

_ELEMENTS = (5, 100_003)  # what goes by one message and what goes by several


def main() -> int:
    """Try each operation; what came out is printed and kept. The exit status is 1 if something is missing."""
    from mpistrat.collectives import gpu_verdicts
    from mpistrat.runtime import mpi
    from mpistrat.runtime.device import cupy_for
    from mpistrat.runtime.topology import Topology
    from mpistrat.strategies.own_device import own_device

    topology = Topology.of(mpi.start().COMM_WORLD)
    missing = "one rank has nobody to exchange with: start at least two" if topology.size == 1 else ""
    try:
        device = own_device(topology, "cuda").use()
    except RuntimeError as error:
        missing = str(error)
    if missing:
        if topology.rank == 0:
            print(missing)
        return 1
    key: list[Any] = gpu_verdicts.key(topology, device.index)
    verdicts: dict[str, str] = {}
    for operation in gpu_verdicts.OPERATIONS:
        if topology.rank == 0:  # before the operation, which may end the program
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

    from mpistrat.collectives import gpu_verdicts
    from mpistrat.collectives.gpu_direct import exchange

    size, rank = topology.size, topology.rank
    for elements in _ELEMENTS:
        parts = size if operation == "Alltoall" else 1
        base = np.arange(elements, dtype=np.float32)
        send = cupy.asarray(np.concatenate([base + 1000 * rank + to for to in range(parts)]))
        receive = cupy.zeros(size * elements, np.float32)
        to = rank if operation == "Alltoall" else 0
        want = np.concatenate([base + 1000 * source + to for source in range(size)])
        error = ""
        try:
            exchange(topology, cupy, operation, send, receive)
        except Exception as problem:  # whatever the library refuses
            error = f"fails: {problem}"
        if not error and not np.array_equal(cupy.asnumpy(receive), want):
            error = "gives wrong values"
        told = [text for text in topology.all_gather_object(error) if text]
        if told:
            return str(told[0])
    return gpu_verdicts.WORKS


if __name__ == "__main__":
    sys.exit(main())
