"""The replicas' arrays, one after another along an axis, on every replica."""

from __future__ import annotations

import numpy as np

from mpistrat.runtime.operation import operation
from mpistrat.runtime.topology import Topology

_LARGEST = (1 << 31) - 1


def all_gather(topology: Topology, value: np.ndarray, axis: int) -> np.ndarray:
    """Concatenate in replica order. Lengths along ``axis`` may differ, all other axes must agree.

    ``MPI_Allgatherv`` (MPI 4.1 section 6.7) of bytes.

    Raises
    ------
    ValueError
        If the value is a scalar, has no such axis, or the other axes or the dtype differ between ranks.
    TypeError
        If it holds Python objects.
    """
    if value.ndim == 0:
        raise ValueError("a scalar has no axis to gather along: give it one, for example value[None]")
    if not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis must be an int, not {axis!r}")
    if not -value.ndim <= axis < value.ndim:
        raise ValueError(f"axis {axis} is out of range for a value of shape {value.shape}")
    if value.dtype.hasobject:
        raise TypeError(f"arrays of Python objects ({value.dtype}) cannot be gathered")
    axis = int(axis) % value.ndim
    rows = np.ascontiguousarray(np.moveaxis(value, axis, 0))
    inner = rows.shape[1:]
    with topology.turn(operation("all_gather", axis, value.ndim, (value.dtype, inner))):
        if topology.size == 1:
            return value.copy(order="C")
        lengths = np.empty(topology.size, np.int64)
        topology.world.Allgather(np.array([len(rows)], np.int64), lengths)
        total = np.empty((int(lengths.sum()), *inner), value.dtype)
        if total.size:
            _all_gather_bytes(topology, rows, lengths * (total.nbytes // len(total)), total)
    return np.ascontiguousarray(np.moveaxis(total, 0, axis))


def _all_gather_bytes(topology: Topology, rows: np.ndarray, counts: np.ndarray, total: np.ndarray) -> None:
    send = rows.reshape(-1).view(np.uint8) if rows.size else np.empty(0, np.uint8)
    receive = total.reshape(-1).view(np.uint8)
    starts = np.concatenate([[0], np.cumsum(counts)])
    if receive.nbytes <= _LARGEST:
        topology.world.Allgatherv(send, [receive, (counts, starts[:-1])])
        return
    # Older MPI libraries count to 2^31: each rank's part in turn, in pieces.
    for rank in range(topology.size):
        part = receive[starts[rank] : starts[rank + 1]]
        if rank == topology.rank:
            part[...] = send
        for start in range(0, len(part), 1 << 30):
            topology.world.Bcast(part[start : start + (1 << 30)], rank)
