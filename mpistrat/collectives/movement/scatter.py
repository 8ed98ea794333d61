"""The scatter and the all-to-all: each rank gets its rows of the arrays of one rank, or of each."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.collectives import structures
from mpistrat.collectives.movement.exchange import exchange
from mpistrat.collectives.movement.gather import Gathered, checked_axis
from mpistrat.collectives.reduce_scatter import rows_of_ranks
from mpistrat.process import mpi
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Topology


class Scattered(NamedTuple):
    """What a rank gets of a scatter: its rows, and the note that rank ``root`` sent to all ranks."""

    arrays: list[np.ndarray]
    note: Any


def scatter(topology: Topology, values: Sequence[np.ndarray], axis: int, root: int, note: Any = None) -> Scattered:
    """Cut the arrays of rank ``root`` along an axis, as evenly as possible, and return to each rank its part of each.

    Other ranks' ``values`` and ``note``, which is pickled, are not used. Raise ValueError for a scalar or a missing
    axis, then `MismatchError` on other ranks, and TypeError if an array holds Python objects.
    """
    is_root = topology.rank == root
    with structures.refusals("scatter", topology):
        axis = operator.index(axis)
        if is_root and any(each.ndim == 0 for each in values):
            raise ValueError(
                "scatter cuts arrays, and a scalar has no axis to cut along. A list is a structure of its items: "
                "to divide the items of a list, scatter numpy.array(the list)"
            )
        axes = [checked_axis(each, axis) for each in values] if is_root else []
    described = [(each.dtype, each.shape, where) for each, where in zip(values, axes, strict=False)]
    noted = topology.pickled("scatter", note) if is_root and topology.size > 1 else None
    with topology.lock.collective(operation("scatter", root, axis)):
        if topology.size == 1:
            return Scattered([each.copy(order="C") for each in values], note)
        described, noted = topology.world.bcast((described, noted), root)
        arrays = [
            _scattered(topology, dtype, shape, where, values[i] if is_root else None, root)
            for i, (dtype, shape, where) in enumerate(described)
        ]
    return Scattered(arrays, mpi.start().pickle.loads(noted))


def _scattered(
    topology: Topology, dtype: np.dtype, shape: tuple[int, ...], axis: int, value: np.ndarray | None, root: int
) -> np.ndarray:
    rest = (*shape[:axis], *shape[axis + 1 :])
    lengths = rows_of_ranks(np.broadcast_to(0, (shape[axis],)), topology.size)
    own = np.empty((lengths[topology.rank], *rest), dtype)
    receives: list[np.ndarray | None] = [None] * topology.size
    receives[root] = as_bytes(own)
    sends: list[np.ndarray | None] = [None] * topology.size
    if value is not None:
        rows = np.ascontiguousarray(np.moveaxis(value, axis, 0))
        ends = [0, *itertools.accumulate(lengths)]
        sends = [as_bytes(rows[first:last]) for first, last in itertools.pairwise(ends)]
    exchange(topology, sends, receives)
    return np.ascontiguousarray(np.moveaxis(own, 0, axis))


def all_to_all(
    topology: Topology, value: np.ndarray, splits: Sequence[int] | None = None
) -> tuple[np.ndarray, list[int]]:
    """Send ``splits[rank]`` consecutive rows to each rank, by default equally many. Return what came, and how many.

    Raise ValueError if the splits do not make the rows, and on every rank if dtypes or row shapes differ. Raise
    TypeError if the value holds Python objects.
    """
    with structures.refusals("all_to_all", topology):
        lengths = _checked(topology, value, splits)
    rows = np.ascontiguousarray(value)
    ends = [0, *itertools.accumulate(lengths)]
    sends = [as_bytes(rows[first:last]) for first, last in itertools.pairwise(ends)]
    with topology.lock.collective(operation("all_to_all", value.ndim, (value.dtype, value.shape[1:]))):
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
