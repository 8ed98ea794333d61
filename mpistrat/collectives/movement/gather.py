"""The gather: the replicas' arrays or objects, on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.collectives import structures
from mpistrat.collectives.movement.all_gather import Gathered, checked_axis, lengths_by_mpi
from mpistrat.collectives.movement.exchange import exchange
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.arrays import as_bytes
from mpistrat.runtime.process import mpi
from mpistrat.runtime.topology import Topology


def gather(topology: Topology, value: np.ndarray, axis: int, root: int) -> np.ndarray | None:
    """Concatenate the ranks' arrays along an axis, in the order of ranks. Return None on other ranks than ``root``.

    The lengths along ``axis`` may differ between ranks.

    Raises
    ------
    ValueError
        If the value is a scalar, does not have this axis, or the other axes or the dtype differ between ranks.
    TypeError
        If the value holds Python objects.
    """
    with structures.refusals("gather", topology):
        axis = checked_axis(value, axis)
    rows = np.ascontiguousarray(np.moveaxis(value, axis, 0))
    what = operation("gather", root, axis, value.ndim, (value.dtype, rows.shape[1:]))
    with topology.lock.turn(what):
        if topology.size == 1:
            return value.copy(order="C")
        lengths = lengths_by_mpi(topology, rows)
        sends: list[np.ndarray | None] = [None] * topology.size
        sends[root] = as_bytes(rows)
        if topology.rank != root:
            exchange(topology, sends, [None] * topology.size)
            return None
        whole = Gathered.like(rows, lengths)
        exchange(topology, sends, whole.parts)
    return np.ascontiguousarray(np.moveaxis(whole.array, 0, axis))


def gather_object(topology: Topology, value: Any, root: int) -> list[Any] | None:
    """Return every rank's (pickled) object, in the order of ranks. Return None on other ranks than ``root``."""
    what = operation("gather_object", root)
    if topology.size == 1:
        with topology.lock.turn(what):
            return [value]
    mine = topology.pickled("gather_object", value)
    with topology.lock.turn(what):
        told = topology.world.gather(mine, root)
    return None if told is None else [mpi.start().pickle.loads(each) for each in told]
