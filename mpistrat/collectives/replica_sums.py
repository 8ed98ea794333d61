"""The all-reduce of replicas of which a rank plays several.

The replicas of a rank give their values one after another. A value is copied or added when it is given, so that the
next replica may write to the same memory. Partial sums follow the fixed tree, so that at most ``2 log2(count) + 1``
flat buffers of a dtype are in use for ``count`` replicas.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from mpistrat.collectives.algorithms.choose import Choice
from mpistrat.collectives.algorithms.exact import exact_sum_over_ranks, settle_extremes
from mpistrat.collectives.algorithms.tree import Shares, reduce_by_tree
from mpistrat.collectives.arithmetic import dtypes
from mpistrat.collectives.arithmetic.division import finish
from mpistrat.collectives.arithmetic.fixed_tree import tree_of_right
from mpistrat.collectives.arithmetic.operations import Op
from mpistrat.collectives.on_host import HostRoute, reduce_one
from mpistrat.collectives.packing import Key, Message, message_of, new_array, unpack
from mpistrat.runtime.agreement.operation import Operation
from mpistrat.runtime.topology import Topology

TREE, EXACT, ORDERED = "tree", "exact", "ordered"


class _Rows:
    """The partial sums of one message."""

    def __init__(self, message: Message, trees: Sequence[range], adds: bool):
        self.message, self._adds = message, adds
        # A dtype costs 0.4 us for each array.
        self._cast = {} if message.wire == message.source else {"dtype": message.wire}
        self._tree_of_right = tree_of_right(trees)
        self._free: list[tuple[np.ndarray, list[np.ndarray]]] = []
        self._parts: list[tuple[range, tuple[np.ndarray, list[np.ndarray]]]] = []

    def clear(self) -> None:
        self._free += [buffer for _, buffer in self._parts]
        self._parts = []

    def give(self, replica: int, arrays: Sequence[np.ndarray]) -> None:
        """Copy or add the arrays of the next replica."""
        message, tree = self.message, range(replica, replica + 1)
        mine = [arrays[i] for i in message.members]
        above = self._tree_of_right.get(tree) if self._adds else None
        if above is None:
            buffer = self._free.pop() if self._free else self._buffer()
            for view, array in zip(buffer[1], mine, strict=True):
                view[...] = array
            self._parts.append((tree, buffer))
            return
        _, left = self._parts.pop()
        for view, array in zip(left[1], mine, strict=True):
            message.combine(view, array, out=view, **self._cast)
        while above in self._tree_of_right:
            _, lower = self._parts.pop()
            message.combine(lower[0], left[0], out=lower[0])
            self._free.append(left)
            above, left = self._tree_of_right[above], lower
        self._parts.append((above, left))

    def _buffer(self) -> tuple[np.ndarray, list[np.ndarray]]:
        flat = np.empty(self.message.length, self.message.wire)
        views: list[np.ndarray] = []
        for where, length, shape in self.message.runs:
            rows = flat[where].reshape(length, *shape)
            views += [rows[i, ...] for i in range(length)]
        return flat, views

    @property
    def parts(self) -> dict[range, np.ndarray]:
        return {tree: flat for tree, (flat, _) in self._parts}


class ReplicaSums:
    """A prepared all-reduce of arrays of these dtypes and shapes, over replicas of which a rank plays several.

    The algorithms "tree" and "exact" have the same bits on any number of ranks. Raise TypeError if ``op`` cannot reduce
    an array, and ValueError for "ordered", which adds in the order of ranks.
    """

    def __init__(
        self,
        topology: Topology,
        shares: Shares,
        op: Op,
        key: Key,
        algorithm: str | None,
        bytes_per_pack: int,
        form: Hashable,
    ):
        if algorithm == ORDERED:
            raise ValueError(
                'implementation="ordered" adds values in the order of ranks, and a rank plays several replicas: use '
                '"tree" or "exact"'
            )
        self._topology, self._shares, self.key, self._algorithm = topology, shares, key, algorithm
        groups: dict[np.dtype, list[int]] = {}
        for i, (dtype, shape) in enumerate(key):
            dtypes.accumulator(dtype, op)
            if math.prod(shape):
                groups.setdefault(dtype, []).append(i)
        size, trees = len(shares.tree), shares.of_rank[topology.rank]
        self._rows = []
        for members in groups.values():
            message = message_of(op, key, members, size)
            # A partial sum is rounded, so an exact sum needs the values themselves: a buffer for each replica. Extremes
            # and products are combined as they come, also by "exact".
            is_exact = algorithm == EXACT and message.wire.kind in "fc"
            self._rows.append(_Rows(message, trees, adds=not is_exact or message.combine is not np.add))
        self._empty = [
            (i, shape, dtypes.result(dtype, op)) for i, (dtype, shape) in enumerate(key) if not math.prod(shape)
        ]
        self._operation = Operation(
            "all_reduce", op.name, key, form, f"of {size} replicas", bytes_per_pack or None, algorithm
        )

    def begin(self) -> None:
        for rows in self._rows:
            rows.clear()

    def give(self, replica: int, arrays: Sequence[np.ndarray]) -> None:
        """Add the arrays of a replica of this rank, which follow those of the replica before. Does not communicate."""
        with np.errstate(all="ignore"):
            for rows in self._rows:
                rows.give(replica, arrays)

    def total(self, timeout_seconds: float | None) -> list[np.ndarray]:
        """Return the reductions of all replicas' arrays. Collective."""
        topology, out = self._topology, [np.empty(0)] * len(self.key)
        meets = self._algorithm == TREE and topology.memory is not None and bool(self._rows)
        with topology.lock.turn(self._operation, meets, timeout_seconds):
            for rows in self._rows:
                total = topology.lock.ignoring_float_errors(self._total, rows)
                unpack(rows.message, total, out)
        for i, shape, dtype in self._empty:
            out[i] = np.empty(shape, dtype)
        return out

    def _total(self, rows: _Rows) -> np.ndarray:
        topology, message = self._topology, rows.message
        parts = [*rows.parts.values()]
        wide = new_array(message.length, message.wire)
        if self._algorithm == TREE:
            reduce_by_tree(topology, self._shares, message.combine, parts, wide)
        elif self._algorithm == EXACT and message.combine is np.add and message.wire.kind in "fc":
            exact_sum_over_ranks(topology, np.stack(parts), wide, len(self._shares.tree))
        else:
            folded = parts[0]
            for part in parts[1:]:
                message.combine(folded, part, out=folded)
            route = HostRoute.of(Choice.of(topology), message, self._algorithm)
            total = reduce_one(topology, message, route, folded)
            if self._algorithm == EXACT and message.wire.kind == "f":
                settle_extremes(total)
            return total
        if message.wire is message.result and message.divisor == 1:
            return wide
        total = wide if message.wire is message.result else new_array(message.length, message.result)
        finish(wide, message.divisor, total)
        return total
