"""The default cross-device ops, where a table chooses the algorithm of each message, and those with one way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrat.arrays import arrays
from mpistrat.arrays.device import Device
from mpistrat.collectives import arena, structures
from mpistrat.collectives.algorithms.choose import Choice
from mpistrat.collectives.arena import reduction_in_place
from mpistrat.collectives.movement.moves import broadcast
from mpistrat.collectives.operations import COMBINE, Op, accumulator, divide, result_dtype
from mpistrat.collectives.ops.base import HOOKS, IN_PAIRS, CrossDeviceOps, collective_all_reduce
from mpistrat.collectives.options import CommunicationImplementation, CommunicationOptions
from mpistrat.collectives.reduce_scatter import Parts, reduce_parts
from mpistrat.collectives.reduction import Key, Reduction, prepared, reduction_of_arrays, reduction_of_joined
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.environment import rc
from mpistrat.runtime.topology import Topology
from mpistrat.values import DistributedValues, IndexedSlices, Mirrored, ReduceOp, component, snapshot

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_ONLY_ARRAYS = {np.ndarray}
_ARRAYS_AND_NUMBERS = arrays.NUMBERS | _ONLY_ARRAYS


class CollectiveAllReduce(CrossDeviceOps):
    """Cross-device ops that pack small arrays and choose an algorithm for each message, or use ``algorithm``.

    ``num_packs`` is the number of messages that a list of arrays is packed into; 0 does not pack. By default the
    options say it. Raise ValueError if it is negative.
    """

    _algorithm: str | None = None  # a subclass may not call __init__
    _num_packs: int | None = None

    def __init__(self, algorithm: str | None = None, num_packs: int | None = None):
        if num_packs is not None and num_packs < 0:
            raise ValueError(f"num_packs must not be negative, not {num_packs}")
        super().__init__()
        self._algorithm, self._num_packs = algorithm, num_packs

    def _rebound_to(self, topology: Topology) -> CrossDeviceOps:
        self._reductions = prepared(topology)
        self._arenas = topology.slot(arena.Arenas)
        self._choice = Choice.of(topology)
        self._has_own_hooks = any(getattr(type(self), hook) is not getattr(CollectiveAllReduce, hook) for hook in HOOKS)
        self._num_packs = self._num_packs  # of the object: found 30 ns sooner than in its class
        # What `all_reduce` may run at once: with hooks of its own, it runs none.
        self._known = {} if self._has_own_hooks else self._reductions
        return super()._rebound_to(topology)

    def reduce_implementation(
        self, reduce_op: Op, per_replica_value: DistributedValues, destinations: Any, options: Any
    ) -> Any:
        return self._combine(reduce_op, [component(per_replica_value)], options)[0]

    def batch_reduce_implementation(
        self, reduce_op: Op, value_destination_pairs: Sequence[tuple[DistributedValues, Any]], options: Any
    ) -> Sequence[Any]:
        values = [component(value) for value, _ in value_destination_pairs]
        return self._combine(reduce_op, values, options, IN_PAIRS)

    def joins_arrays(self, options: CommunicationOptions) -> bool:
        packs, limit = self._num_packs, options.bytes_per_pack
        return not (self._has_own_hooks or (limit if packs is None else packs > 1))

    def _compare(self, op: Op, form: Hashable, values: Sequence[Any], options: CommunicationOptions) -> None:
        """Compare values as `CrossDeviceOps._compare`, if one is not sent; else the reduction compares them."""
        if self._has_own_hooks or not values or any(isinstance(value, Mirrored) for value in values):
            super()._compare(op, form, values, options)

    def all_reduce(self, op: Op, values: list[Any], options: CommunicationOptions, form: Hashable = None) -> list[Any]:
        value = values[0] if len(values) == 1 else None
        if type(value) is np.ndarray:  # each further function takes 60 ns
            algorithm = self._algorithm or options.algorithm
            key = (op, form, algorithm, options.bytes_per_pack, self._num_packs, value.dtype, value.shape)
            reduction = self._known.get(key)
            if reduction is not None and (value.base is None or not self._arenas):
                return reduction.run(values, options.timeout_seconds)
        if self._has_own_hooks:
            return super().all_reduce(op, values, options, form)
        return self._combine(op, values, options, form)

    def all_reduce_arrays(
        self, op: Op, values: list[np.ndarray], options: CommunicationOptions, form: Hashable
    ) -> list[Any]:
        if self._has_own_hooks:
            return super().all_reduce(op, values, options, form)
        return self._combine_arrays(op, values, options, form)

    def joined_all_reduce(
        self, op: Op, key: Key, out: np.ndarray, options: CommunicationOptions, form: Hashable
    ) -> Reduction | None:
        if not self.joins_arrays(options):
            return None
        topology, algorithm = self._ranks, self._algorithm or options.algorithm
        with structures.refusals("all_reduce", topology, options.timeout_seconds):
            return reduction_of_joined(topology, self._choice, op, key, out, algorithm, form)

    def reduce_parts(
        self, op: Op, dtype: np.dtype, parts: Parts, options: CommunicationOptions, form: Hashable
    ) -> np.ndarray | None:
        if self._has_own_hooks:
            return None
        algorithm = self._algorithm or options.algorithm
        with structures.refusals("reduce_scatter", self._ranks, options.timeout_seconds):
            wire = accumulator(dtype, op)
        if algorithm is not None:
            self._choice.best(0, wire, algorithm)  # raises if it does not work here
        lengths = tuple(sum(map(len, part)) for part in parts)
        regions = arena.arenas_of(self._ranks, [*itertools.chain(*parts)]) if self._arenas else []
        by_number = {region and region.number: region for region in regions}
        region = by_number.popitem()[1] if len(by_number) == 1 and len(self._ranks.nodes) == 1 else None
        number = region.number if region is not None and region.shared else None
        description = operation("reduce_scatter", op.name, (dtype, (sum(lengths),)), lengths, form, algorithm, number)

        def rows_of(array: np.ndarray) -> list[np.ndarray]:
            assert region is not None
            (start,) = arena.offsets_of(region, [array])
            return arena.rows_at(region, arena.ArenaSpan(start, len(array), dtype), self._ranks.node.size)

        arguments = description, algorithm, options.timeout_seconds, None if number is None else rows_of
        return reduce_parts(self._ranks, op, dtype, parts, *arguments)

    def _combine(self, op: Op, values: list[Any], options: CommunicationOptions, form: Hashable = None) -> list[Any]:
        """Combine plain values of this replica; sparse rows are gathered."""
        kinds = set(map(type, values))
        if kinds == _ONLY_ARRAYS:
            return self._combine_arrays(op, values, options, form)
        if not kinds or not kinds <= _ARRAYS_AND_NUMBERS:
            return self._combine_kinds(op, values, options, form)
        totals = self._combine_arrays(op, [*map(np.asarray, values)], options, form)
        pairs = zip(totals, values, strict=True)
        return [total if type(value) is np.ndarray else total[()] for total, value in pairs]

    def _combine_arrays(
        self, op: Op, values: list[np.ndarray], options: CommunicationOptions, form: Hashable
    ) -> list[np.ndarray]:
        key: tuple[Any, ...] = (op, form, self._algorithm or options.algorithm)
        if self._arenas and not (len(values) == 1 and values[0].base is None):
            done = self._reduce_in_place(key, op, values, options, form)
            if done is not None:
                return done
        key += options.bytes_per_pack, self._num_packs
        if len(values) == 1:
            key += values[0].dtype, values[0].shape
        else:  # two tuples hash faster than a tuple of pairs, which matters for hundreds of small arrays
            key += tuple(map(_dtype, values)), tuple(map(_shape, values))
        reduction = self._reductions.get(key)
        if reduction is None:
            described = tuple((value.dtype, value.shape) for value in values)
            arguments = self._bytes_per_pack(values, options), self._algorithm or options.algorithm
            topology = self._topology or self._ranks
            try:
                reduction = reduction_of_arrays(topology, self._choice, op, described, *arguments, form)
            except (TypeError, ValueError, NotImplementedError) as error:
                structures.refuse("all_reduce", topology, error, options.timeout_seconds)
                raise
            self._reductions.keep(key, reduction)
        return reduction.run(values, options.timeout_seconds)

    def _reduce_in_place(
        self, key: tuple[Any, ...], op: Op, values: list[np.ndarray], options: CommunicationOptions, form: Hashable
    ) -> list[np.ndarray] | None:
        """Reduce a list with buffers; None if none of them can be reduced where it is."""
        key = (*key, *map(id, values))
        reduction = self._reductions.get(key)
        if reduction is not None and reduction.is_for(values):
            return reduction.run(values, options.timeout_seconds)
        topology = self._ranks
        regions = arena.arenas_of(topology, values)
        if not any(regions):
            return None
        groups: dict[int | None, list[int]] = {}
        for i, (value, region) in enumerate(zip(values, regions, strict=True)):
            # The mean of integers is floating point: it does not fit into the memory of its values.
            in_place = result_dtype(value.dtype, op) == value.dtype
            groups.setdefault(region.number if region is not None and in_place else None, []).append(i)
        if list(groups) == [None]:
            return None
        if len(groups) > 1:
            return self._reduce_groups(op, values, options, form, groups)
        region = regions[0]
        assert region is not None
        with structures.refusals("all_reduce", topology, options.timeout_seconds):
            algorithm = self._algorithm or options.algorithm
            reduction = reduction_in_place(topology, self._choice, op, region, values, algorithm, form)
        self._reductions.keep(key, reduction)
        return reduction.run(values, options.timeout_seconds)

    @collective_all_reduce
    def _reduce_groups(
        self,
        op: Op,
        values: list[np.ndarray],
        options: CommunicationOptions,
        form: Hashable,
        groups: Mapping[int | None, list[int]],
    ) -> list[np.ndarray]:
        """Reduce the arrays outside arenas, then the buffers in place, arena by arena: several operations."""
        layout = tuple(("elsewhere" if number is None else number, *indices) for number, indices in groups.items())
        structures.agree(self._ranks, "all_reduce", op.name, form, layout, timeout_seconds=options.timeout_seconds)
        out = list(values)
        # The rest comes first: these arrays may be parts of the buffers.
        for _, indices in sorted(groups.items(), key=lambda group: group[0] is not None):
            totals = self._combine_arrays(op, [values[i] for i in indices], options, form)
            for i, total in zip(indices, totals, strict=True):
                out[i] = total
        return out

    def _combine_kinds(self, op: Op, values: list[Any], options: CommunicationOptions, form: Hashable) -> list[Any]:
        """Combine values of which some are not NumPy arrays."""
        kinds = tuple(map(structures.kind, values))
        hosted, on_gpu, sparse = (
            [i for i, value_kind in enumerate(kinds) if value_kind == kind]
            for kind in (structures.HOST, structures.GPU, structures.ROWS)
        )
        out: list[Any] = list(values)
        with structures.refusals("all_reduce", self._ranks, options.timeout_seconds):
            on_host = [arrays.to_host(values[i]) for i in hosted]
        if sparse or (hosted and on_gpu):  # several operations
            structures.agree(self._ranks, "all_reduce", op.name, form, kinds, timeout_seconds=options.timeout_seconds)
        if on_gpu:
            with arrays.stream_of(*(values[i] for i in on_gpu)):
                self._reduce_on_gpu(op, on_gpu, out, options, form)
        if hosted or not values:
            totals = self._combine_arrays(op, on_host, options, form)
            for i, total in zip(hosted, totals, strict=True):
                out[i] = arrays.from_host(total, values[i])
        for i in sparse:
            out[i] = self.all_reduce_rows(op, values[i], options.timeout_seconds)
        return out

    def _reduce_on_gpu(
        self, op: Op, indices: list[int], out: list[Any], options: CommunicationOptions, form: Hashable
    ) -> None:
        """Replace the arrays of ``out`` at ``indices``, which are on a GPU, by their reductions."""
        from mpistrat.collectives.gpu import all_reduce as gpu_all_reduce  # most programs do not use a GPU

        with structures.refusals("all_reduce", self._ranks, options.timeout_seconds):
            values = [arrays.to_cupy(out[i]) for i in indices]
            device = arrays.require_one_device(values)
        route, packs = self._gpu_route(options), self._num_packs
        shapes = tuple(map(_dtype, values)), tuple(map(_shape, values))
        objects = tuple(map(id, values)) if any(arena.arenas_of(self._ranks, values)) else None
        key = (op, form, route, options.bytes_per_pack, packs, rc.nccl_half, device.index, *shapes, objects)
        reduction = self._reductions.get(key)
        if reduction is None or (objects is not None and not reduction.is_for(values)):
            reduction = gpu_all_reduce.reduction_on_gpu(
                self._ranks, op, values, device, self._bytes_per_pack(values, options), route, form
            )
            self._reductions.keep(key, reduction)
        for i, total in zip(indices, reduction.run(values, options.timeout_seconds), strict=True):
            out[i] = arrays.from_cupy(total, out[i])

    def _gpu_route(self, options: CommunicationOptions) -> str | None:
        """Return the name of the route for arrays on GPUs, or of an algorithm of the host; None for automatic."""
        ring = options.implementation is CommunicationImplementation.RING
        return self._algorithm or options.algorithm or ("pinned" if ring else None)

    def _bytes_per_pack(self, values: Sequence[Any], options: CommunicationOptions) -> int:
        if self._num_packs is None:
            return options.bytes_per_pack
        if self._num_packs == 0:
            return 1  # every array is larger than one byte, so each gets its own message
        return math.ceil(sum(value.nbytes for value in values) / self._num_packs)


class Copies(CollectiveAllReduce):
    """The cross-device ops of one replica, which may reduce objects of any type: the results are copies."""

    def all_reduce(self, op: Op, values: list[Any], options: CommunicationOptions, form: Hashable = None) -> list[Any]:
        arenas = self._arenas  # buffers are reduced where they are
        return [value if id(getattr(value, "base", None)) in arenas else snapshot(value) for value in values]

    def joins_arrays(self, options: CommunicationOptions) -> bool:
        return False


class HierarchicalCopyAllReduce(CollectiveAllReduce):
    """Cross-device ops that reduce to each node's leader, all-reduce between leaders, and copy back.

    Parameters
    ----------
    num_packs : int
        The number of messages that a list of arrays is packed into; 0 does not pack.

    Raises
    ------
    ValueError
        If ``num_packs`` is negative.

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.MirroredStrategy(cross_device_ops=mpistrat.HierarchicalCopyAllReduce())
    >>> float(strategy.reduce("SUM", 3.0, axis=None))
    3.0
    """

    def __init__(self, num_packs: int = 1):
        super().__init__("hierarchical_copy", num_packs)


class NcclAllReduce(CollectiveAllReduce):
    """Cross-device ops that reduce arrays on GPUs by NCCL, and arrays on the host as `CollectiveAllReduce`.

    Parameters
    ----------
    num_packs : int
        The number of messages that a list of arrays is packed into; 0 does not pack.

    Raises
    ------
    ValueError
        If ``num_packs`` is negative.
    RuntimeError
        If CuPy, its NCCL or a GPU is missing: the text says which. On every rank at the first reduction, if two
        ranks share a GPU.

    Examples
    --------
    >>> import mpistrat
    >>> try:
    ...     ops = mpistrat.NcclAllReduce()
    ... except RuntimeError as error:
    ...     ops = mpistrat.HierarchicalCopyAllReduce()
    """

    def __init__(self, num_packs: int = 1):
        super().__init__(num_packs=num_packs)
        from mpistrat.collectives.gpu.nccl import nccl_for

        nccl_for("NcclAllReduce")

    def _gpu_route(self, options: CommunicationOptions) -> str | None:
        return "nccl"


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
    >>> import mpistrat, numpy as np
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
            return self.all_reduce_rows(op, value, timeout_seconds)
        host = np.ascontiguousarray(arrays.to_host(value)).reshape(np.shape(value))
        accumulator(host.dtype, op)
        description = operation("reduce to one device", op.name, (host.dtype, host.shape))
        with topology.lock.collective(description, timeout_seconds=timeout_seconds):
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
        wide = accumulator(parts[0].dtype, op)
        result = result_dtype(parts[0].dtype, op)
        accumulate = self._accumulate or partial(combined, op)
        total = np.asarray(accumulate([part.astype(wide, copy=False) for part in parts]))
        if op is ReduceOp.MEAN:
            total = np.asarray(divide(total, len(parts)))
        return total.astype(result, copy=False) if total.dtype == wide or op is ReduceOp.MEAN else total
