"""The route by a CUDA-aware MPI library that moves values between GPUs, with sums by CuPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.collectives.arithmetic.division import finish
from mpistrat.collectives.gpu import pointers as gpu_pointers
from mpistrat.collectives.gpu.combine import combine_on_gpu
from mpistrat.collectives.gpu.packing import Laid, widened
from mpistrat.collectives.gpu.route import GpuCall, Route
from mpistrat.runtime.device import cupy_for
from mpistrat.runtime.topology import Topology


class GpuDirectRoute(Route):
    """The route of all-to-all, sums of one part on each rank's GPU, and all-gather."""

    name = "gpu_direct"

    def obstacle(self, topology: Topology, device: int) -> str:
        found = gpu_pointers.obstacles(topology, device)
        return found["Alltoall"] or found["Allgather"]

    def supports(self, wire: np.dtype, combine: np.ufunc) -> bool:
        return wire.kind in "iufc"

    def reduce(self, call: GpuCall, jobs: Sequence[Laid]) -> None:
        cupy = cupy_for("arrays on GPUs")
        topology = call.topology
        with gpu_pointers.scratch(call.device) as memory:
            for job in jobs:
                message = widened(job)
                wide = job.total if job.total.dtype == message.dtype else cupy.empty_like(message)
                step = gpu_pointers.PIECE_BYTES // topology.size // message.itemsize * topology.size
                for start in range(0, len(message), step):
                    part = slice(start, start + step)
                    _reduce_piece(topology, memory, job.message.combine, message[part], wide[part])
                finish(wide, job.message.divisor, job.total)


def _reduce_piece(
    topology: Topology, memory: gpu_pointers.Scratch, combine: np.ufunc, message: Any, total: Any
) -> None:
    size, dtype = topology.size, message.dtype
    each = -(-len(message) // size)
    send, receive = (way[: size * each * dtype.itemsize].view(dtype) for way in (memory.send, memory.receive))
    send[: len(message)] = message
    gpu_pointers.all_to_all(topology, send, receive)
    own = send[:each]
    combine_on_gpu(combine, list(receive.reshape(size, each)), own)
    gpu_pointers.all_gather(topology, own, receive)
    total[...] = receive[: len(message)]
