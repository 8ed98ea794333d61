"""By moves of a CUDA-aware MPI library between the memories of GPUs, and sums by CuPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpistrat.collectives import gpu_verdicts
from mpistrat.collectives.gpu_packing import Job, finish, widened
from mpistrat.collectives.gpu_route import Route
from mpistrat.runtime import device_memory, mpi
from mpistrat.runtime.device import cupy_for
from mpistrat.runtime.topology import Topology

_PIECE_BYTES = 64 << 20

_idle: dict[int, list[Scratch]] = {}


class Scratch:
    """What the library is given: it maps and registers memory, and lets go of none of it, so always the same."""

    def __init__(self, cupy: Any):
        self.send = device_memory.allocate(_PIECE_BYTES)
        self.receive = device_memory.allocate(_PIECE_BYTES)
        self.left = cupy.cuda.Event(disable_timing=True)


@contextmanager
def _scratch(cupy: Any, device: int) -> Iterator[Scratch]:
    """The memory of one thread, once the stream that it was last used in has left it."""
    waiting, stream = _idle.setdefault(device, []), cupy.cuda.get_current_stream()
    try:
        memory = waiting.pop()
    except IndexError:
        memory = Scratch(cupy)
    stream.wait_event(memory.left)
    try:
        yield memory
    finally:
        memory.left.record(stream)
        waiting.append(memory)


class GpuDirectRoute(Route):
    """Every rank gets its part of all ranks' values, adds it up on its GPU, and all get all parts.

    ``MPI_Alltoall`` and ``MPI_Allgather`` (MPI 4.1 sections 6.8 and 6.7) on device pointers, and never a reduction:
    libraries make these by a copy on the host that is not pinned, or not at all.
    """

    name = "gpu_direct"

    def obstacle(self, topology: Topology, device: int) -> str:
        problem, key, mode = "", None, ""
        try:
            mode = gpu_verdicts.mode()
            key = gpu_verdicts.key(topology, device)
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        told = topology.world.allgather((problem, mode, key))
        for rank, (text, _, _) in enumerate(told):
            if text:
                return f"rank {rank}: {text}"
        if len({mode for _, mode, _ in told}) > 1:
            return f"{gpu_verdicts.VARIABLE} differs between ranks: {[mode for _, mode, _ in told]}"
        if mode != "auto":
            return "" if mode == "on" else f"{gpu_verdicts.VARIABLE} is off"
        if any(other != key for _, _, other in told):
            return "the ranks have GPUs, drivers or MPI libraries of several kinds"
        assert key is not None
        found = gpu_verdicts.obstacle(key) if topology.rank == 0 else None
        return str(topology.world.bcast(found))

    def supports(self, wire: np.dtype, combine: np.ufunc) -> bool:
        return wire.kind in "iufc"

    def reduce(
        self,
        topology: Topology,
        device: int,
        jobs: Sequence[Job],
        algorithm: str | None,
        timeout_seconds: float | None,
    ) -> None:
        cupy = cupy_for("arrays on GPUs")
        with _scratch(cupy, device) as memory:
            for job in jobs:
                message = widened(job)
                wide = job.total if job.total.dtype == message.dtype else cupy.empty_like(message)
                step = _PIECE_BYTES // topology.size // message.itemsize * topology.size
                for start in range(0, len(message), step):
                    part = slice(start, start + step)
                    _reduce_piece(topology, cupy, memory, job.bucket.combine, message[part], wide[part])
                finish(job, wide)


def _reduce_piece(
    topology: Topology, cupy: Any, memory: Scratch, combine: np.ufunc, message: Any, total: Any
) -> None:
    size = topology.size
    each = -(-len(message) // size)
    send, receive = (each_way[: size * each * message.itemsize] for each_way in (memory.send, memory.receive))
    mine = send.view(message.dtype)
    mine[: len(message)] = message
    exchange(topology, cupy, "Alltoall", send, receive)
    rows = receive.view(message.dtype).reshape(size, each)
    own = mine[:each]
    own[...] = rows[0]
    for row in rows[1:]:
        combine(own, row, out=own)
    exchange(topology, cupy, "Allgather", send[: each * message.itemsize], receive)
    total[...] = receive.view(message.dtype)[: len(message)]


def exchange(topology: Topology, cupy: Any, operation: str, send: Any, receive: Any) -> None:
    """A blocking move of bytes between arrays on GPUs, once both are free of what the stream still does to them."""
    MPI = mpi.start()
    cupy.cuda.get_current_stream().synchronize()
    ends = [[MPI.buffer.fromaddress(int(each.data.ptr), each.nbytes), MPI.BYTE] for each in (send, receive)]
    getattr(topology.world, operation)(*ends)
