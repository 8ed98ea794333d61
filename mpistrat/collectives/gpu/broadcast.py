"""The broadcast of an array on a GPU, by device pointers."""

from __future__ import annotations

from typing import Any

from mpistrat.collectives.gpu import pointers as gpu_pointers
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.device import cupy_for
from mpistrat.runtime.gpu.kernels import as_bits, copy_each
from mpistrat.runtime.topology import Topology


def broadcast(topology: Topology, value: Any, root: int = 0) -> Any:
    """Return a copy of the CuPy array of rank ``root``. On other ranks ``value`` gives the dtype and shape.

    Return None on every rank if the MPI library does not take device pointers for it.
    """
    cupy, device = cupy_for("arrays on GPUs"), int(value.device.id)
    with cupy.cuda.Device(device):
        if not gpu_pointers.possible(topology, device, "Bcast"):
            return None
        what = operation("broadcast on GPUs", root, (value.dtype, value.shape))
        with topology.lock.turn(what):
            total = value.copy() if topology.rank == root else cupy.empty(value.shape, value.dtype)
            if total.nbytes and topology.size > 1:
                with gpu_pointers.scratch(device) as memory:
                    _broadcast(topology, memory, as_bits(total), root)
    return total


def _broadcast(topology: Topology, memory: gpu_pointers.Scratch, data: Any, root: int) -> None:
    """Broadcast piece by piece, through two buffers in alternation, so that copies overlap with messages."""
    ways = [way.view(data.dtype) for way in (memory.send, memory.receive)]
    step = len(ways[0])
    for number, start in enumerate(range(0, len(data), step)):
        piece = data[start : start + step]
        way = ways[number % 2][: len(piece)]
        if topology.rank == root:
            copy_each([piece], [way])
        gpu_pointers.broadcast(topology, way, root)
        if topology.rank != root:
            copy_each([way], [piece])
