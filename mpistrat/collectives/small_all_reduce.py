"""The all-reduce of one small message, prepared once for many values.

It makes the same barriers and the same sums as `packing.reduce` with `HierarchicalAllReduce` on one node or
`LeaderAllReduce` on several nodes. The general way takes several microseconds more of Python. In this time the ranks
of a node could pass five barriers. The difference is larger where several processes share a core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from operator import setitem
from typing import Any

import numpy as np

from mpistrat.collectives.algorithms.hierarchical import ALL_BY_EACH_BYTES
from mpistrat.collectives.combine_rows import combine_rows
from mpistrat.collectives.division import divide
from mpistrat.collectives.packing import SMALL, Bucket, Plan, new_array, unpack
from mpistrat.runtime.agreement.agreement import PAYLOAD_BYTES, Payload
from mpistrat.runtime.memory.node import NodeMemory
from mpistrat.runtime.topology import Topology

Reduce = Callable[[Any], Any]
LayDown = Callable[[Any, Any, Any], None]  # as operator.setitem


def supports(topology: Topology, plan: Plan) -> bool:
    """Return whether a plan has one message only, small enough and combined in the dtype of its arrays."""
    if len(plan.buckets) != 1 or plan.empty or topology.compares_places:
        return False
    bucket = plan.buckets[0]
    nbytes = bucket.length * bucket.wire.itemsize
    if len(topology.nodes) == 1:
        usual, small = "hierarchical", topology.size * nbytes <= ALL_BY_EACH_BYTES
    else:
        usual, small = "leader", nbytes <= PAYLOAD_BYTES
    return (
        small
        and bucket.algorithm.name == usual
        and bucket.length <= bucket.piece
        and bucket.source is bucket.wire is bucket.result
    )


def prepare(topology: Topology, plan: Plan, shapes: tuple[tuple[int, ...], ...]) -> Reduce:
    """Return a function that takes this rank's arrays of these shapes and returns their reductions.

    For one shape the function takes and returns an array instead of a list. It runs the whole collective, including
    the collective lock, and is valid as long as the topology.
    """
    bucket = plan.buckets[0]
    prepare_message = _on_one_node if len(topology.nodes) == 1 else _between_nodes
    if len(shapes) == 1:
        return prepare_message(topology, plan, setitem, shapes[0])

    def join(message: np.ndarray, all_of_it: Any, arrays: list[np.ndarray]) -> None:
        np.concatenate(arrays, bucket.axis, message)

    reduce_many = prepare_message(topology, plan, join, (bucket.length,))

    def reduce(arrays: list[np.ndarray]) -> list[np.ndarray]:
        out: list[Any] = [None] * len(arrays)
        unpack(bucket, reduce_many(arrays), out)
        return out

    return reduce


def _on_one_node(topology: Topology, plan: Plan, lay_down: LayDown, shape: tuple[int, ...]) -> Reduce:
    memory, bucket, operation = topology.memory, plan.buckets[0], plan.operation
    assert memory is not None
    begin, failed, disagree = topology.begin, topology.failed, topology.disagree
    meet_saying, ignoring_float_errors = memory.meet_saying, topology.ignoring_float_errors
    rank, combine = memory.rank, bucket.combine
    messages = _messages(memory, bucket, shape)
    new = _allocator(bucket, shape)
    two = memory.size == 2 and bucket.divisor == 1

    def reduce(values: Any) -> np.ndarray:
        word = begin(operation)
        try:
            rows = messages[memory.generation]
            lay_down(rows[rank], ..., values)
            if not meet_saying(word):
                disagree(operation)
            total = new()
            if two:
                ignoring_float_errors(combine, rows[0], rows[1], out=total)
            else:
                ignoring_float_errors(_add_up, bucket, rows, total)
            topology.taken = False
            return total
        except BaseException as error:
            failed(type(error))
            raise

    return reduce


def _between_nodes(topology: Topology, plan: Plan, lay_down: LayDown, shape: tuple[int, ...]) -> Reduce:
    memory, bucket, operation = topology.memory, plan.buckets[0], plan.operation
    assert memory is not None
    begin, failed = topology.begin, topology.failed
    ignoring_float_errors = topology.ignoring_float_errors
    dtype, divisor, combine = bucket.result, bucket.divisor, bucket.combine
    mine = [rows[memory.rank] for rows in _messages(memory, bucket, shape)]
    flat = _messages(memory, bucket, (bucket.length,))
    result = memory.total(dtype, bucket.length).reshape(shape)
    new = _allocator(bucket, shape)
    two = memory.size == 2

    def fill(total: np.ndarray) -> None:
        rows = flat[memory.generation ^ 1]
        if two:
            combine(rows[0], rows[1], out=total)
        else:
            combine_rows(combine, rows, total)

    agree = topology.combining(Payload(dtype, bucket.length, combine, fill))

    def reduce(values: Any) -> np.ndarray:
        word = begin(operation)
        try:
            lay_down(mine[memory.generation], ..., values)
            if not ignoring_float_errors(agree, word):
                topology.disagree(operation)
            total = new()
            total[...] = result
            if divisor != 1:
                ignoring_float_errors(divide, total, divisor, total)
            topology.taken = False
            return total
        except BaseException as error:
            failed(type(error))
            raise

    return reduce


def _allocator(bucket: Bucket, shape: tuple[int, ...]) -> Callable[[], np.ndarray]:
    return partial(np.empty if bucket.length <= SMALL else _reused, shape, bucket.result)


def _reused(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return new_array(math.prod(shape), dtype).reshape(shape)


def _messages(memory: NodeMemory, bucket: Bucket, shape: tuple[int, ...]) -> list[list[np.ndarray]]:
    """Return the slots of all ranks of the node, by generation."""
    return [
        [row.reshape(shape) for row in memory.slots(bucket.result, bucket.length, generation)[1]]
        for generation in (0, 1)
    ]


def _add_up(bucket: Bucket, rows: list[np.ndarray], total: np.ndarray) -> None:
    bucket.combine(rows[0], rows[1], out=total)
    for row in rows[2:]:
        bucket.combine(total, row, out=total)
    if bucket.divisor != 1:
        divide(total, bucket.divisor, total)
