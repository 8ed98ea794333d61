"""The all-gather of arrays on GPUs along an axis, by device pointers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mpistrat.collectives.gpu import pointers as gpu_pointers
from mpistrat.collectives.movement.all_gather import checked_axis, lengths_by_mpi
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.device import cupy_for
from mpistrat.runtime.gpu.kernels import as_bits, copy_each
from mpistrat.runtime.topology import Topology

_EVEN, _UNEVEN = "Allgather", "Allgatherv"


def all_gather(topology: Topology, value: Any, axis: int, timeout_seconds: float | None = None) -> Any:
    """Gather CuPy arrays as `all_gather.all_gather` does.

    Return None on every rank if the MPI library does not take device pointers for it.
    """
    axis = checked_axis(value, axis)
    cupy, device = cupy_for("arrays on GPUs"), int(value.device.id)
    with cupy.cuda.Device(device):
        if not (
            gpu_pointers.possible(topology, device, _EVEN) or gpu_pointers.possible(topology, device, _UNEVEN)
        ):
            return None
        rows = cupy.ascontiguousarray(cupy.moveaxis(value, axis, 0) if axis else value)
        what = operation("all_gather on GPUs", axis, value.ndim, (value.dtype, rows.shape[1:]))
        with topology.lock.turn(what, timeout_seconds=timeout_seconds):
            if topology.size == 1:
                return value.copy()
            lengths = lengths_by_mpi(topology, rows)
            if not gpu_pointers.possible(topology, device, _EVEN if len(set(lengths)) == 1 else _UNEVEN):
                return None
            total = cupy.empty((sum(lengths), *rows.shape[1:]), rows.dtype)
            if total.nbytes:
                with gpu_pointers.scratch(device) as memory:
                    _gather(topology, memory, as_bits(rows), as_bits(total), lengths)
        return cupy.ascontiguousarray(cupy.moveaxis(total, 0, axis)) if axis else total


def _gather(
    topology: Topology, memory: gpu_pointers.Scratch, mine: Any, total: Any, lengths: Sequence[int]
) -> None:
    words = len(total) // sum(lengths)  # in a row
    starts = [0, *itertools.accumulate(length * words for length in lengths)]
    parts = [total[first:last] for first, last in itertools.pairwise(starts)]
    send, receive = (way.view(total.dtype) for way in (memory.send, memory.receive))
    step = len(receive) // topology.size
    for start in range(0, max(map(len, parts)), step):
        pieces = [part[start : start + step] for part in parts]
        counts = [len(piece) for piece in pieces]
        own = send[: counts[topology.rank]]
        copy_each([mine[start : start + step]], [own])
        if len(set(counts)) == 1:
            gpu_pointers.all_gather(topology, own, receive[: sum(counts)])
        else:
            gpu_pointers.all_gather_uneven(topology, own, receive[: sum(counts)], counts)
        ends = itertools.pairwise([0, *itertools.accumulate(counts)])
        copy_each([receive[first:last] for first, last in ends], pieces)
