"""The all-reduce of sparse rows, made by gathering them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpistrat.collectives.arithmetic import dtypes
from mpistrat.collectives.arithmetic.operations import FurtherOp, Op, divide
from mpistrat.collectives.movement import any_library
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Topology
from mpistrat.values import IndexedSlices, ReduceOp


def all_reduce_slices(
    topology: Topology,
    op: Op,
    value: IndexedSlices,
    timeout_seconds: float | None = None,
    gathered: Callable[..., Any] | None = None,
    replicas: int | None = None,
) -> IndexedSlices:
    """Return the rows of all replicas in replica order, for a mean each divided by the number of replicas.

    Rows of equal index stay separate. ``gathered(array, 0, timeout_seconds)`` gathers those of ``replicas`` replicas,
    by default one for each rank. Raise ValueError if row shapes, dtypes or dense shapes differ between ranks.
    """
    if isinstance(op, FurtherOp):
        raise TypeError(f"{op.name} of sparse rows is not defined: make them dense")
    dtypes.accumulator(value.dtype, op)
    what = operation("all_reduce of sparse rows", op.name, value.dense_shape)
    topology.lock.compare(what, timeout_seconds)
    gathered = gathered or partial(any_library.gathered, topology)
    rows, indices = (gathered(each, 0, timeout_seconds) for each in (value.values, value.indices))
    if op is ReduceOp.MEAN:
        wide = rows.astype(dtypes.accumulator(value.dtype, op), copy=False)
        rows = divide(wide, replicas or topology.size).astype(dtypes.result(value.dtype, op), copy=False)
    return IndexedSlices(rows, indices, value.dense_shape)
