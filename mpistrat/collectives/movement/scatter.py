"""The scatter: each rank gets its rows of the arrays of one rank."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.collectives import structures
from mpistrat.collectives.movement.all_gather import checked_axis
from mpistrat.collectives.movement.exchange import exchange
from mpistrat.collectives.reduce_scatter import rows_of_ranks
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.arrays import as_bytes
from mpistrat.runtime.process import mpi
from mpistrat.runtime.topology import Topology


class Scattered(NamedTuple):
    """What a rank gets of a scatter: its rows, and the note that rank ``root`` sent to all ranks."""

    arrays: list[np.ndarray]
    note: Any


def scatter(
    topology: Topology, values: Sequence[np.ndarray], axis: int, root: int, note: Any = None
) -> Scattered:
    """Cut the arrays of rank ``root`` along an axis, and return to each rank its part of each.

    Parts are as even as possible: the first ranks may get a row more. ``values`` and the (pickled) ``note`` of other
    ranks are not used.

    Raises
    ------
    ValueError
        If an array is a scalar or does not have this axis. On other ranks than ``root``: `MismatchError`.
    TypeError
        If an array holds Python objects.
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
    with topology.lock.turn(operation("scatter", root, axis)):
        if topology.size == 1:
            return Scattered([each.copy(order="C") for each in values], note)
        described, noted = topology.world.bcast((described, noted), root)
        arrays = [
            _scattered(topology, dtype, shape, where, values[i] if is_root else None, root)
            for i, (dtype, shape, where) in enumerate(described)
        ]
    return Scattered(arrays, mpi.start().pickle.loads(noted))


def _scattered(
    topology: Topology,
    dtype: np.dtype,
    shape: tuple[int, ...],
    axis: int,
    value: np.ndarray | None,
    root: int,
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
