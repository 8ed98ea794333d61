"""The reduce-scatter of arrays on GPUs: parts travel by device pointers, and CuPy adds them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.collectives.arithmetic.division import finish
from mpistrat.collectives.arithmetic.operations import Op
from mpistrat.collectives.gpu import pointers as gpu_pointers
from mpistrat.collectives.gpu.combine import combine_on_gpu
from mpistrat.collectives.gpu.packing import Laid, widened
from mpistrat.collectives.packing import message_of
from mpistrat.collectives.reduce_scatter import rows_of_ranks
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.device import cupy_for
from mpistrat.runtime.gpu.kernels import copy_each
from mpistrat.runtime.topology import Topology


def reduce_scatter(topology: Topology, op: Op, value: Any, timeout_seconds: float | None = None) -> Any:
    """Reduce and scatter CuPy arrays as `reduce_scatter.reduce_scatter` does, in the order of ranks.

    Return None on every rank if the MPI library does not take device pointers for it.
    """
    rows = rows_of_ranks(value, topology.size)
    key = ((value.dtype, tuple(value.shape)),)
    whole = message_of(op, key, [0], topology.size)  # raises if ``op`` does not support the dtype
    cupy, device = cupy_for("arrays on GPUs"), int(value.device.id)
    with cupy.cuda.Device(device):
        if not gpu_pointers.possible(topology, device, "Alltoall"):
            return None
        flat = cupy.ascontiguousarray(value).reshape(-1)
        width = math.prod(value.shape[1:])
        ends = [0, *itertools.accumulate([each * width for each in rows])]
        own = ends[topology.rank + 1] - ends[topology.rank]
        total = cupy.empty((rows[topology.rank], *value.shape[1:]), whole.result)
        job = Laid(whole, flat, total.reshape(-1))
        what = operation("reduce_scatter on GPUs", op.name, (value.dtype, value.shape))
        with topology.lock.turn(what, timeout_seconds=timeout_seconds):
            wide_send = widened(job)
            wide = job.total if whole.result == whole.wire else cupy.empty(own, whole.wire)
            parts = [wide_send[first:last] for first, last in itertools.pairwise(ends)]
            if topology.size == 1:
                wide[...] = wide_send
            else:
                with gpu_pointers.scratch(device) as memory:
                    _scatter(topology, memory, whole.combine, parts, wide)
        if own:
            finish(wide, whole.divisor, job.total)
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
            way[: size * count * dtype.itemsize].view(dtype) for way in (memory.send, memory.receive)
        )
        pieces = [part[start : start + count] for part in parts]
        copy_each(pieces, [send[i * count : i * count + len(each)] for i, each in enumerate(pieces)])
        gpu_pointers.all_to_all(topology, send, receive)
        mine = len(pieces[topology.rank])
        if mine:
            got = [receive[i * count : i * count + mine] for i in range(size)]
            combine_on_gpu(combine, got, wide[start : start + mine])
