"""Adasum: sums in which parallel vectors count as their mean, and orthogonal ones in full.

Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.collectives.arithmetic import dtypes
from mpistrat.collectives.movement.exchange import exchange
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.topology import Topology
from mpistrat.values import ReduceOp

_SMALLEST = np.sqrt(sys.float_info.min)


def check(topology: Topology, values: Sequence[np.ndarray]) -> None:
    """Raise unless arrays can be combined.

    It is NotImplementedError if the number of ranks is not a power of two, and TypeError if an array is not floating
    point.
    """
    if topology.size & (topology.size - 1):
        raise NotImplementedError(
            f"Adasum of {topology.size} ranks: their number must be a power of two; use op=Average"
        )
    for each in values:
        if not dtypes.has_mean(each.dtype) or each.dtype.kind == "c":
            raise TypeError(f"Adasum of {each.dtype} is not defined: cast to a floating point dtype")


def adasum(topology: Topology, values: Sequence[np.ndarray], form: str | None) -> list[np.ndarray]:
    """Return the combinations of arrays over all ranks, each array by itself. Collective.

    In step ``i`` the ranks that differ in bit ``i`` exchange what they have, and both compute the same. Values of half
    precision are combined in float32. Raise MismatchError on every rank if shapes or dtypes differ between ranks.
    """
    rank, size = topology.rank, topology.size
    what = operation("all_reduce", "Adasum", tuple((each.dtype, each.shape) for each in values), form)
    totals = [each.astype(dtypes.accumulator(each.dtype, ReduceOp.SUM)).reshape(-1) for each in values]
    with topology.lock.turn(what):
        level = 1
        while level < size:
            partner = rank ^ level
            others = [np.empty_like(each) for each in totals]
            for mine, theirs in zip(totals, others, strict=True):
                sends: list[np.ndarray | None] = [None] * size
                receives: list[np.ndarray | None] = [None] * size
                sends[partner], receives[partner] = as_bytes(mine), as_bytes(theirs)
                exchange(topology, sends, receives)
            pairs = zip(totals, others, strict=True) if rank < partner else zip(others, totals, strict=True)
            totals = [combined(*pair) for pair in pairs]
            level *= 2
    return [
        total.astype(value.dtype, copy=False).reshape(value.shape) for total, value in zip(totals, values, strict=True)
    ]


def combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the adaptive sum of two vectors.

    >>> x, y = np.array([2.0, 0.0]), np.array([0.0, 3.0])
    >>> combined(x, x), combined(x, y)
    (array([2., 0.]), array([2., 3.]))
    """
    wide_a, wide_b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
    dot, of_a, of_b = wide_a @ wide_b, wide_a @ wide_a, wide_b @ wide_b
    weight_a = 1 - dot / of_a / 2 if of_a >= _SMALLEST else 1.0
    weight_b = 1 - dot / of_b / 2 if of_b >= _SMALLEST else 1.0
    return a.dtype.type(weight_a) * a + b.dtype.type(weight_b) * b
