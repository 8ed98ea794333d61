"""The all-reduce of one small message inside a node, with all prepared that does not depend on its values.

The same meeting and the same sums as the general way, which is `packing.reduce` by `HierarchicalAllReduce` and
slower by what Python does in between: several microseconds, in which the ranks could meet five times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.collectives.hierarchical import ALL_BY_EACH_BYTES
from mpistrat.collectives.packing import SMALL, Bucket, Plan, unpack
from mpistrat.runtime.topology import COMPARES_PLACES, Topology

Reduce = Callable[[Any], Any]


def supports(topology: Topology, plan: Plan) -> bool:
    """Whether a plan is that of one message that is small enough, and combined in the dtype of its arrays."""
    if len(topology.nodes) > 1 or len(plan.buckets) != 1 or plan.empty or COMPARES_PLACES:
        return False
    bucket = plan.buckets[0]
    return (
        bucket.algorithm.name == "hierarchical"
        and bucket.length <= min(SMALL, bucket.piece)
        and topology.size * bucket.length * bucket.wire.itemsize <= ALL_BY_EACH_BYTES
        and bucket.source is bucket.wire is bucket.result
    )


def prepare(topology: Topology, plan: Plan, shapes: tuple[tuple[int, ...], ...]) -> Reduce:
    """A function that takes this rank's arrays of those shapes and returns the combinations of all ranks'.

    That of one array takes the array itself, and returns one. It makes the whole collective, turn included, and is
    valid as long as the topology.
    """
    bucket = plan.buckets[0]
    if len(shapes) == 1:
        return _prepare(topology, plan, np.copyto, shapes[0])

    def join(message: np.ndarray, arrays: list[np.ndarray]) -> None:
        np.concatenate(arrays, bucket.axis, message)

    reduce_many = _prepare(topology, plan, join, (bucket.length,))

    def reduce(arrays: list[np.ndarray]) -> list[np.ndarray]:
        out: list[Any] = [None] * len(arrays)
        unpack(bucket, reduce_many(arrays), out)
        return out

    return reduce


def _prepare(
    topology: Topology, plan: Plan, lay_down: Callable[[np.ndarray, Any], None], shape: tuple[int, ...]
) -> Callable[[Any], np.ndarray]:
    memory, bucket, operation = topology.memory, plan.buckets[0], plan.operation
    assert memory is not None
    begin, end, meet_saying = topology.begin, topology.end, memory.meet_saying
    ignoring_float_errors, empty, disagree = topology.ignoring_float_errors, np.empty, topology.disagree
    combine, dtype = bucket.combine, bucket.result
    rank, word, said_by_all = memory.rank, operation.word, operation.word_bytes * memory.size
    messages = [
        [row.reshape(shape) for row in memory.slots(dtype, bucket.length, generation)[1]]
        for generation in (0, 1)
    ]
    one_call = memory.size == 2 and bucket.divisor == 1

    def reduce(values: Any) -> np.ndarray:
        begin(operation)
        try:
            rows = messages[memory.generation]
            lay_down(rows[rank], values)
            if meet_saying(word) != said_by_all:
                disagree(operation)
            total = empty(shape, dtype)
            if one_call:
                ignoring_float_errors(combine, *rows, out=total)
            else:
                ignoring_float_errors(_add_up, bucket, rows, total)
            return total
        finally:
            end()

    return reduce


def _add_up(bucket: Bucket, rows: list[np.ndarray], total: np.ndarray) -> None:
    bucket.combine(rows[0], rows[1], out=total)
    for row in rows[2:]:
        bucket.combine(total, row, out=total)
    if bucket.divisor != 1:
        np.divide(total, total.dtype.type(bucket.divisor), out=total)
