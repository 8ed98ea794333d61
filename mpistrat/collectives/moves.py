"""All-gather, broadcast and reduce-scatter of a value of any library: on the GPU where it lives, else by the host.

A GPU's array goes by way of pinned memory and the host where the MPI library cannot be given device pointers for just
this operation.
"""

from __future__ import annotations

from typing import Any

from mpistrat.collectives import all_gather, broadcast, dtypes, reduce_scatter, structures
from mpistrat.collectives.operations import Op
from mpistrat.runtime import arrays
from mpistrat.runtime.topology import Topology


def described_for_gather(value: Any, axis: int) -> tuple[str, int, tuple[Any, ...]]:
    """Kind, axis, and dtype with the lengths of the other axes: what the ranks compare of an array that they gather.

    Raises
    ------
    ValueError, TypeError
        If it cannot be gathered.
    """
    array = arrays.numpy_or_cupy(value)
    axis = all_gather.checked_axis(array, axis)
    rest = (*array.shape[:axis], *array.shape[axis + 1 :])
    return structures.kind(value), axis, (array.dtype, rest)


def described_for_scatter(op: Op, value: Any) -> tuple[str, tuple[Any, ...]]:
    """Kind, and dtype with shape: what the ranks compare of an array that they combine and scatter.

    Raises
    ------
    ValueError, TypeError
        If it cannot be combined or scattered.
    """
    array = arrays.numpy_or_cupy(value)
    reduce_scatter.rows_of_ranks(array, 1)
    dtypes.accumulator(array.dtype, op)
    return structures.kind(value), (array.dtype, tuple(array.shape))


def gathered(topology: Topology, value: Any, axis: int, timeout_seconds: float | None = None) -> Any:
    """As `all_gather.all_gather`, given back as what it was."""
    if arrays.on_gpu(value):
        from mpistrat.collectives.gpu import all_gather as gpu_all_gather  # most programs need none of it

        found = gpu_all_gather.all_gather(topology, arrays.to_cupy(value), axis, timeout_seconds)
        if found is not None:
            return arrays.from_cupy(found, value)
    host = all_gather.all_gather(topology, arrays.to_host(value), axis, timeout_seconds)
    return arrays.from_host(host, value)


def broadcasted(topology: Topology, value: Any) -> Any:
    """Replica 0's value, given back as what this replica's was."""
    if arrays.on_gpu(value):
        from mpistrat.collectives.gpu import broadcast as gpu_broadcast  # most programs need none of it

        found = gpu_broadcast.broadcast(topology, arrays.to_cupy(value))
        if found is not None:
            return arrays.from_cupy(found, value)
    with structures.refusals("broadcast", topology):
        host = arrays.to_host(value)
    (host,) = broadcast.broadcast(topology, [host])
    return arrays.from_host(host, value)


def scattered(topology: Topology, op: Op, value: Any, timeout_seconds: float | None = None) -> Any:
    """As `reduce_scatter.reduce_scatter`, given back as what it was."""
    if arrays.on_gpu(value):
        from mpistrat.collectives.gpu import (
            reduce_scatter as gpu_reduce_scatter,  # most programs need none of it
        )

        found = gpu_reduce_scatter.reduce_scatter(topology, op, arrays.to_cupy(value), timeout_seconds)
        if found is not None:
            return arrays.from_cupy(found, value)
    host = reduce_scatter.reduce_scatter(topology, op, arrays.to_host(value), timeout_seconds)
    return arrays.from_host(host, value)
