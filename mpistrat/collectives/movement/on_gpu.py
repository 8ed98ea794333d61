"""The all-gather, broadcast and reduce-scatter of arrays on GPUs, by device pointers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays.device import cupy_for, on_device
from mpistrat.arrays.gpu.kernels import as_bits, copy_each
from mpistrat.collectives.gpu import pointers as gpu_pointers
from mpistrat.collectives.gpu.route import PackedMessage, combine_on_gpu, widened
from mpistrat.collectives.movement.moves import checked_axis, lengths_by_mpi
from mpistrat.collectives.operations import Op, finish
from mpistrat.collectives.reduce_scatter import rows_of_ranks
from mpistrat.collectives.reduction import message_of
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Topology

_EVEN, _UNEVEN = "Allgather", "Allgatherv"


def all_gather(topology: Topology, value: Any, axis: int, timeout_seconds: float | None = None) -> Any:
    """Gather CuPy arrays as `moves.all_gather`. Return None on every rank if MPI takes no device pointers for it."""
    axis = checked_axis(value, axis)
    cupy, device = cupy_for("arrays on GPUs"), int(value.device.id)
    with on_device(device):
        if not (gpu_pointers.possible(topology, device, _EVEN) or gpu_pointers.possible(topology, device, _UNEVEN)):
            return None
        rows = cupy.ascontiguousarray(cupy.moveaxis(value, axis, 0) if axis else value)
        description = operation("all_gather on GPUs", axis, value.ndim, (value.dtype, rows.shape[1:]))
        with topology.lock.collective(description, timeout_seconds=timeout_seconds):
            if topology.size == 1:
                return value.copy()
            lengths = lengths_by_mpi(topology, rows)
            # Here all ranks have all lengths, so that either all return None or none does.
            if not gpu_pointers.possible(topology, device, _EVEN if len(set(lengths)) == 1 else _UNEVEN):
                return None
            total = cupy.empty((sum(lengths), *rows.shape[1:]), rows.dtype)
            if total.nbytes:
                with gpu_pointers.scratch(device) as memory:
                    _gather(topology, memory, as_bits(rows), as_bits(total), lengths)
        return cupy.ascontiguousarray(cupy.moveaxis(total, 0, axis)) if axis else total


def _gather(topology: Topology, memory: gpu_pointers.Scratch, data: Any, total: Any, lengths: Sequence[int]) -> None:
    words = len(total) // sum(lengths)  # in a row
    starts = [0, *itertools.accumulate(length * words for length in lengths)]
    parts = [total[first:last] for first, last in itertools.pairwise(starts)]
    send, receive = (buffer.view(total.dtype) for buffer in (memory.send, memory.receive))
    step = len(receive) // topology.size
    for start in range(0, max(map(len, parts)), step):
        pieces = [part[start : start + step] for part in parts]
        counts = [len(piece) for piece in pieces]
        message = send[: counts[topology.rank]]
        copy_each([data[start : start + step]], [message])
        if len(set(counts)) == 1:
            gpu_pointers.all_gather(topology, message, receive[: sum(counts)])
        else:
            gpu_pointers.all_gather_uneven(topology, message, receive[: sum(counts)], counts)
        ends = itertools.pairwise([0, *itertools.accumulate(counts)])
        copy_each([receive[first:last] for first, last in ends], pieces)


def broadcast(topology: Topology, value: Any, root: int = 0) -> Any:
    """Return a copy of the CuPy array of rank ``root``, like this rank's in dtype and shape; None as `all_gather`."""
    cupy, device = cupy_for("arrays on GPUs"), int(value.device.id)
    with on_device(device):
        if not gpu_pointers.possible(topology, device, "Bcast"):
            return None
        description = operation("broadcast on GPUs", root, (value.dtype, value.shape))
        with topology.lock.collective(description):
            total = value.copy() if topology.rank == root else cupy.empty(value.shape, value.dtype)
            if total.nbytes and topology.size > 1:
                with gpu_pointers.scratch(device) as memory:
                    _broadcast(topology, memory, as_bits(total), root)
    return total


def _broadcast(topology: Topology, memory: gpu_pointers.Scratch, data: Any, root: int) -> None:
    """Broadcast piece by piece, through two buffers in alternation, so that copies overlap with messages."""
    buffers = [buffer.view(data.dtype) for buffer in (memory.send, memory.receive)]
    step = len(buffers[0])
    for number, start in enumerate(range(0, len(data), step)):
        piece = data[start : start + step]
        buffer = buffers[number % 2][: len(piece)]
        if topology.rank == root:
            copy_each([piece], [buffer])
        gpu_pointers.broadcast(topology, buffer, root)
        if topology.rank != root:
            copy_each([buffer], [piece])


def reduce_scatter(topology: Topology, value: Any, op: Op, timeout_seconds: float | None = None) -> Any:
    """Do as `reduce_scatter.reduce_scatter` for CuPy arrays, in the order of ranks. Return None as `all_gather`."""
    rows = rows_of_ranks(value, topology.size)
    key = ((value.dtype, tuple(value.shape)),)
    message = message_of(op, key, [0], topology.size)  # raises if ``op`` does not support the dtype
    cupy, device = cupy_for("arrays on GPUs"), int(value.device.id)
    with on_device(device):
        if not gpu_pointers.possible(topology, device, "Alltoall"):
            return None
        flat = cupy.ascontiguousarray(value).reshape(-1)
        width = math.prod(value.shape[1:])
        ends = [0, *itertools.accumulate([count * width for count in rows])]
        own_length = ends[topology.rank + 1] - ends[topology.rank]
        total = cupy.empty((rows[topology.rank], *value.shape[1:]), message.result)
        job = PackedMessage(message, flat, total.reshape(-1))
        description = operation("reduce_scatter on GPUs", op.name, (value.dtype, value.shape))
        with topology.lock.collective(description, timeout_seconds=timeout_seconds):
            wide_send = widened(job)
            wide = job.total if message.result == message.wire else cupy.empty(own_length, message.wire)
            parts = [wide_send[first:last] for first, last in itertools.pairwise(ends)]
            if topology.size == 1:
                wide[...] = wide_send
            else:
                with gpu_pointers.scratch(device) as memory:
                    _scatter(topology, memory, message.combine, parts, wide)
        if own_length:
            finish(wide, message.divisor, job.total)
    return total


def _scatter(
    topology: Topology, memory: gpu_pointers.Scratch, combine: np.ufunc, parts: Sequence[Any], wide: Any
) -> None:
    size, dtype = topology.size, wide.dtype
    longest = max(map(len, parts))
    step = gpu_pointers.PIECE_BYTES // size // dtype.itemsize
    for start in range(0, longest, step):
        count = min(step, longest - start)
        send, receive = (
            buffer[: size * count * dtype.itemsize].view(dtype) for buffer in (memory.send, memory.receive)
        )
        pieces = [part[start : start + count] for part in parts]
        # The longest part sets the distance. What lies after a shorter one is sent as well, and not read.
        copy_each(pieces, [send[i * count : i * count + len(piece)] for i, piece in enumerate(pieces)])
        gpu_pointers.all_to_all(topology, send, receive)
        length = len(pieces[topology.rank])
        if length:
            rows = [receive[i * count : i * count + length] for i in range(size)]
            combine_on_gpu(combine, rows, wide[start : start + length])
