"""All-gather, broadcast and reduce-scatter of a value of any library, on the GPU or the host.

An array on a GPU goes through pinned memory and the host where the MPI library does not take device pointers for this
operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.collectives import reduce_scatter, structures
from mpistrat.collectives.movement import moves
from mpistrat.collectives.operations import Op, accumulator
from mpistrat.runtime.topology import Topology


def described_for_gather(value: Any, axis: int) -> tuple[str, int, tuple[Any, ...]]:
    """Return what ranks compare before a gather: kind, axis, dtype with other axes. Raise if it is wrong."""
    array = arrays.numpy_or_cupy(value)
    axis = moves.checked_axis(array, axis)
    rest = (*array.shape[:axis], *array.shape[axis + 1 :])
    return structures.kind(value), axis, (array.dtype, rest)


def described_for_scatter(op: Op, value: Any) -> tuple[str, tuple[Any, ...]]:
    """Return what ranks compare before a reduce-scatter: kind, dtype with shape. Raise if it is wrong."""
    array = arrays.numpy_or_cupy(value)
    reduce_scatter.rows_of_ranks(array, 1)
    accumulator(array.dtype, op)
    return structures.kind(value), (array.dtype, tuple(array.shape))


def _moved(name: str, topology: Topology, value: Any, on_host: Callable[[], np.ndarray], *arguments: Any) -> Any:
    """Return a result in the library of ``value``: of `on_gpu`, or ``on_host()`` where MPI takes no device pointers."""
    if arrays.on_gpu(value):
        from mpistrat.collectives.movement import on_gpu  # most programs do not use a GPU

        with arrays.stream_of(value):
            result = getattr(on_gpu, name)(topology, arrays.to_cupy(value), *arguments)
            if result is not None:
                return arrays.from_cupy(result, value)
    return arrays.from_host(on_host(), value)


def gathered(
    topology: Topology, value: Any, axis: int, timeout_seconds: float | None = None, root: int | None = None
) -> Any:
    """Gather a value as `moves.all_gather` does, and return an array of the library of ``value``.

    With ``root``, only this rank gets the result, through the host, and the others None.
    """
    if root is not None:
        total = moves.gather(topology, arrays.to_host(value), axis, root, timeout_seconds)
        return None if total is None else arrays.from_host(total, value)
    return _moved(
        "all_gather",
        topology,
        value,
        lambda: moves.all_gather(topology, arrays.to_host(value), axis, timeout_seconds),
        axis,
        timeout_seconds,
    )


def broadcasted(topology: Topology, value: Any) -> Any:
    """Return the value of replica 0, as an array of the library of this replica's ``value``."""

    def on_host() -> np.ndarray:
        with structures.refusals("broadcast", topology):
            host = arrays.to_host(value)
        return moves.broadcast(topology, [host])[0]

    return _moved("broadcast", topology, value, on_host)


def scattered(topology: Topology, op: Op, value: Any, timeout_seconds: float | None = None) -> Any:
    """Reduce and scatter as `reduce_scatter.reduce_scatter` does, and return an array of the library of ``value``."""
    return _moved(
        "reduce_scatter",
        topology,
        value,
        lambda: reduce_scatter.reduce_scatter(topology, op, arrays.to_host(value), timeout_seconds),
        op,
        timeout_seconds,
    )
