"""The all-to-all: each rank sends rows to every other, as many as it likes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from mpistrat.collectives import structures
from mpistrat.collectives.movement.all_gather import Gathered
from mpistrat.collectives.movement.exchange import exchange
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.arrays import as_bytes
from mpistrat.runtime.topology import Topology


def all_to_all(
    topology: Topology, value: np.ndarray, splits: Sequence[int] | None = None
) -> tuple[np.ndarray, list[int]]:
    """Send consecutive rows to rank 0, 1, and so on. Return the rows that came, and how many of each rank.

    Parameters
    ----------
    topology : Topology
    value : numpy.ndarray
        Dtype and the lengths of all axes but the first must be equal on all ranks.
    splits : sequence of int, optional
        How many rows go to each rank; by default equally many.

    Raises
    ------
    ValueError
        If the splits do not make the rows. On every rank, if shapes or dtypes do not fit together.
    TypeError
        If the value holds Python objects.
    """
    with structures.refusals("all_to_all", topology):
        lengths = _checked(topology, value, splits)
    rows = np.ascontiguousarray(value)
    ends = [0, *itertools.accumulate(lengths)]
    sends = [as_bytes(rows[first:last]) for first, last in itertools.pairwise(ends)]
    with topology.lock.turn(operation("all_to_all", value.ndim, (value.dtype, value.shape[1:]))):
        if topology.size == 1:
            return rows.copy(), lengths
        announced = np.empty(topology.size, np.int64)
        topology.world.Alltoall(np.array(lengths, np.int64), announced)
        received = [int(each) for each in announced]
        whole = Gathered.like(rows, received)
        exchange(topology, sends, whole.parts)
    return whole.array, received


def _checked(topology: Topology, value: np.ndarray, splits: Sequence[int] | None) -> list[int]:
    if value.dtype.hasobject:
        raise TypeError(f"arrays of Python objects ({value.dtype}) cannot be sent")
    if value.ndim == 0:
        raise ValueError("a scalar has no rows to send: give it an axis, for example value[None]")
    if splits is None:
        if len(value) % topology.size:
            raise ValueError(f"{len(value)} rows cannot be divided among {topology.size} ranks: give splits")
        return [len(value) // topology.size] * topology.size
    lengths = [int(each) for each in splits]
    if len(lengths) != topology.size or sum(lengths) != len(value) or min(lengths) < 0:
        raise ValueError(f"splits {lengths} do not make {len(value)} rows for {topology.size} ranks")
    return lengths
