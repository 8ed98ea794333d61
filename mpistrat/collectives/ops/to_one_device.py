"""Cross-device ops that gather values to one rank, combine them there, and broadcast the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.arrays.device import Device
from mpistrat.collectives.arithmetic import dtypes
from mpistrat.collectives.arithmetic.division import divide
from mpistrat.collectives.arithmetic.operations import COMBINE, Op
from mpistrat.collectives.movement.broadcast import broadcast
from mpistrat.collectives.ops.base import CrossDeviceOps
from mpistrat.collectives.sparse import all_reduce_slices
from mpistrat.runtime.agreement.operation import operation
from mpistrat.values import DistributedValues, IndexedSlices, ReduceOp, component


def combined(op: Op, values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the combination of some arrays in their order; for a mean their sum."""
    total = values[0].copy()
    for value in values[1:]:
        COMBINE[op](total, value, out=total)
    return total


class ReductionToOneDevice(CrossDeviceOps):
    """Cross-device ops that combine on replica 0, by any function. Simple, but slow.

    Parameters
    ----------
    reduce_to_device : str, optional
        The name of a device. Checked, but without effect: each rank has one device.
    accumulation_fn : callable, optional
        A function of the list of the replicas' arrays, in replica order, that returns one array. By default the sum.

    Raises
    ------
    ValueError
        If ``reduce_to_device`` is not the name of a device.
    TypeError
        If ``accumulation_fn`` cannot be called.

    Examples
    --------
    >>> import mpistrat
    >>> import numpy as np
    >>> ops = mpistrat.ReductionToOneDevice(accumulation_fn=lambda values: np.max(values, axis=0))
    >>> strategy = mpistrat.MirroredStrategy(cross_device_ops=ops)
    >>> float(strategy.reduce("SUM", 3.0, axis=None))
    3.0
    """

    def __init__(
        self, reduce_to_device: str | None = None, accumulation_fn: Callable[[Sequence[np.ndarray]], Any] | None = None
    ):
        super().__init__()
        self._device = None if reduce_to_device is None else Device.parse(reduce_to_device)
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(f"accumulation_fn must be callable, not {accumulation_fn!r}")
        self._accumulate = accumulation_fn

    def reduce_implementation(
        self, reduce_op: Op, per_replica_value: DistributedValues, destinations: Any, options: Any
    ) -> Any:
        return self._reduce(reduce_op, component(per_replica_value), options.timeout_seconds)

    def batch_reduce_implementation(
        self, reduce_op: Op, value_destination_pairs: Sequence[tuple[DistributedValues, Any]], options: Any
    ) -> Sequence[Any]:
        return [self.reduce_implementation(reduce_op, *pair, options) for pair in value_destination_pairs]

    def _reduce(self, op: Op, value: Any, timeout_seconds: float | None) -> Any:
        topology = self._ranks
        if isinstance(value, IndexedSlices):
            return all_reduce_slices(topology, op, value, timeout_seconds)
        host = np.ascontiguousarray(arrays.to_host(value)).reshape(np.shape(value))
        dtypes.accumulator(host.dtype, op)
        what = operation("reduce to one device", op.name, (host.dtype, host.shape))
        with topology.lock.turn(what, timeout_seconds=timeout_seconds):
            parts = topology.world.gather(host, 0) if topology.size > 1 else [host.copy()]
        total = host

        def combine() -> tuple[tuple[int, ...], np.dtype]:
            nonlocal total
            total = self._combine(op, parts)
            return total.shape, total.dtype

        shape, dtype = topology.on_first(combine)
        if topology.rank:
            total = np.empty(shape, dtype)
        return arrays.from_host(broadcast(topology, [total])[0], value)

    def _combine(self, op: Op, parts: Sequence[np.ndarray]) -> np.ndarray:
        wide = dtypes.accumulator(parts[0].dtype, op)
        result = dtypes.result(parts[0].dtype, op)
        accumulate = self._accumulate or partial(combined, op)
        total = np.asarray(accumulate([part.astype(wide, copy=False) for part in parts]))
        if op is ReduceOp.MEAN:
            total = np.asarray(divide(total, len(parts)))
        return total.astype(result, copy=False) if total.dtype == wide or op is ReduceOp.MEAN else total
