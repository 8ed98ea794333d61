"""Reductions, samples of which are computed again by another rank."""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.collectives.algorithms.exact import exact_sum_of_rows, settle_extremes
from mpistrat.collectives.algorithms.tree import combine_rows, combine_tree
from mpistrat.collectives.operations import COMBINE, FurtherOp, Op, accumulator, finish, parse_op, result_dtype
from mpistrat.runtime.topology import Topology
from mpistrat.values import ReduceOp
from mpistrat.verify.corruption import CorruptionError, corruption, same, suspects
from mpistrat.verify.digest import section

_ONE_IN, _LEAST = 1000, 256  # elements: a sample has one in so many, and at least so many
_MOST_BYTES = 4 << 20  # of the samples of all ranks, which one of them gets


class SumSample:
    """What this rank's replicas contribute to some elements of a reduction, neighbours of one dtype.

    ``order`` has, for each replica, the number of its row among the rows of all ranks. Values are added in this order:
    by the fixed tree, or one after another. ``number`` draws the elements, each with the same probability.
    """

    def __init__(self, op: str, algorithm: Any, order: Sequence[int], number: int):
        self.name, self._op, self._algorithm = f"all_reduce {op}", parse_op(op), algorithm
        self._order, self._number = order, number
        self._ends: list[int] = []  # of the arrays, as if they were joined
        self._pieces: list[tuple[int, int, int]] = []  # the array, and the ends of the elements in it
        self.rows: list[np.ndarray] = []
        self.nanoseconds = 0  # of `take`

    def take(self, values: Sequence[Any]) -> None:
        """Copy the elements of the next replica of this rank."""
        began = time.perf_counter_ns()
        if not self._ends:
            self._ends = [*itertools.accumulate([value.size for value in values], initial=0)]
            self._draw(values)
        rows = [section(values[i], start, stop) for i, start, stop in self._pieces]
        self.rows.append(np.concatenate(rows) if rows else np.empty(0))
        self.nanoseconds += time.perf_counter_ns() - began

    def _draw(self, values: Sequence[Any]) -> None:
        total = self._ends[-1]
        at = self._number % max(1, total)
        first = bisect.bisect_right(self._ends, at) - 1
        if total:
            dtype = values[first].dtype
            left = min(max(_LEAST, total // _ONE_IN), _MOST_BYTES // (len(self._order) * dtype.itemsize) or 1)
            at -= self._ends[first]
            others = [*range(first + 1, len(values)), *range(first)]
            spans = [(first, at, values[first].size), *[(i, 0, values[i].size) for i in others], (first, 0, at)]
            for i, start, stop in spans:
                stop = min(stop, start + left)
                if start < stop and values[i].dtype == dtype:
                    self._pieces.append((i, start, stop))
                    left -= stop - start

    def result(self, out: Sequence[Any]) -> np.ndarray:
        """Return these elements of the result: a list of arrays, or all of them joined."""
        joined = len(out) + 1 < len(self._ends)
        places = [(0, self._ends[i], a, b) if joined else (i, 0, a, b) for i, a, b in self._pieces]
        return np.concatenate([section(out[i], at + a, at + b) for i, at, a, b in places] or [np.empty(0)])

    def element(self, number: int) -> tuple[int, int]:
        """Return the array of a sampled element, and its number in it."""
        return [(i, k) for i, start, stop in self._pieces for k in range(start, stop)][number]

    @property
    def has_equal_bits(self) -> bool:
        """Whether all ranks have the same bits: a processor may round products of complex numbers in two ways."""
        return not (self._op is FurtherOp.PROD and self.rows[0].dtype.kind == "c")

    def wrong(self, of_ranks: Sequence[Sequence[np.ndarray]], result: np.ndarray) -> np.ndarray:
        """Return for each element of the block whether the result is not that of the contributions of all ranks."""
        rows = [row for rows in of_ranks for row in rows]
        op, dtype = self._op, rows[0].dtype
        wire = accumulator(dtype, op)
        rows = [rows[i].astype(wire) for i in self._order]
        divisor = len(rows) if op is ReduceOp.MEAN else 1
        with np.errstate(all="ignore"):
            wide = self._combined(op, rows, wire)
            total = np.empty(len(wide), result_dtype(dtype, op))
            finish(wide, divisor, total)
            equal = same(total, result)
            if equal.all() or not self._may_round(op, wire):
                return ~equal
            return ~equal & self._is_beyond_rounding(op, rows, divisor, total, result)

    def _combined(self, op: Op, rows: list[np.ndarray], wire: np.dtype) -> np.ndarray:
        wide = np.empty(len(rows[0]), wire)
        if self._algorithm == "exact" and op in (ReduceOp.SUM, ReduceOp.MEAN) and wire.kind in "fc":
            exact_sum_of_rows(rows, wide)
        elif self._algorithm == "tree":
            leaves = {range(i, i + 1): row for i, row in enumerate(rows)}
            combine_tree(COMBINE[op], leaves, range(len(rows)), wide)
        else:
            combine_rows(COMBINE[op], rows, wide)
            if self._algorithm == "exact" and wire.kind == "f":
                settle_extremes(wide)
        return wide

    def _may_round(self, op: Op, wire: np.dtype) -> bool:
        """Return whether the bits of the result depend on the order of the values, which is not known."""
        if wire.kind not in "fc" or op in (FurtherOp.MAX, FurtherOp.MIN):
            return False
        return self._algorithm not in ("ordered", "tree", "exact") or not self.has_equal_bits

    def _is_beyond_rounding(
        self, op: Op, rows: list[np.ndarray], divisor: int, total: np.ndarray, result: np.ndarray
    ) -> np.ndarray:
        """Return whether results differ by more than ``2 (n + 2) eps sum|x|``; False where one may overflow."""
        sizes, info, one = [np.abs(row) for row in rows], _limits(result.dtype), rows[0].real.dtype.type(1)
        if op is FurtherOp.PROD:
            high = np.multiply.reduce([np.maximum(row, one) for row in sizes])
            in_range = np.multiply.reduce([np.minimum(row, one) for row in sizes]) > float(info.tiny)
            size = np.multiply.reduce(sizes)
        else:
            high = np.add.reduce(sizes)
            size, in_range = high / divisor, True
        in_range &= high < float(info.max) / 4  # False for NaN and infinities, too
        deviation = np.abs(result.astype(rows[0].dtype) - total.astype(rows[0].dtype))
        bound = 2 * (len(rows) + 2) * float(info.eps) * size + len(rows) * float(info.tiny)
        beyond: np.ndarray = in_range & ~(deviation <= bound)
        return beyond


def _limits(dtype: np.dtype) -> Any:
    if dtype.kind in "fc":
        return np.finfo(dtype)
    import ml_dtypes  # NumPy does not know bfloat16

    return ml_dtypes.finfo(dtype)


def wrong_result(topology: Topology, sample: SumSample, result: np.ndarray) -> CorruptionError | None:
    """Return the error of all ranks for a result that differs, or is not that of its values. Collective.

    Return None if only the bits differ.
    """
    gathered = topology.world.allgather((sample.rows, result))
    contributions, results = [rows for rows, _ in gathered], [block for _, block in gathered]
    wrong = [sample.wrong(contributions, block) for block in results]
    ranks = tuple(rank for rank, of_rank in enumerate(wrong) if of_rank.any())
    anywhere = np.logical_or.reduce(wrong)
    if not ranks and sample.has_equal_bits:
        anywhere, ranks = np.logical_or.reduce([~same(results[0], block) for block in results]), suspects(results)
    if not anywhere.any():
        return None
    what = f"{sample.name} has a wrong result"
    return corruption(topology, sample.name, what, results, ranks, anywhere, sample.element)
