"""The default cross-device ops: arrays are packed, and a table chooses the algorithm of each message."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrat.collectives import dtypes, packing, small_all_reduce, structures
from mpistrat.collectives.arenas import all_reduce as arena_all_reduce
from mpistrat.collectives.arenas import arena
from mpistrat.collectives.operations import Op
from mpistrat.collectives.ops.base import IN_PAIRS, CrossDeviceOps
from mpistrat.collectives.options import CommunicationImplementation, CommunicationOptions
from mpistrat.collectives.sparse import all_reduce_slices
from mpistrat.runtime import arrays
from mpistrat.runtime.topology import Topology
from mpistrat.values import DistributedValues, Mirrored, component

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_ONLY_ARRAYS = {np.ndarray}


class CollectiveAllReduce(CrossDeviceOps):
    """Cross-device ops that pack small arrays and choose an algorithm for each message.

    Parameters
    ----------
    algorithm : str, optional
        The name of the algorithm for all messages; by default a table chooses one for each message.
    """

    def __init__(self, algorithm: str | None = None):
        super().__init__()
        self._algorithm = algorithm
        self._plans: dict[Any, packing.Plan] = {}
        self._small: dict[Any, small_all_reduce.Reduce] = {}
        self._plans_in_place: dict[Any, arena_all_reduce.InPlace] = {}

    def _rebound_to(self, topology: Topology) -> CrossDeviceOps:
        self._plans, self._plans_in_place, self._small = {}, {}, {}
        self._arenas = topology.slot(arena.Arenas)
        return super()._rebound_to(topology)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if {"reduce_implementation", "batch_reduce_implementation"} & cls.__dict__.keys():
            cls._compare = CrossDeviceOps._compare  # type: ignore[method-assign]
            cls.all_reduce = CrossDeviceOps.all_reduce  # calls the hooks
            cls.all_reduce_arrays = CrossDeviceOps.all_reduce_arrays
            cls.all_reduce_array = CrossDeviceOps.all_reduce_array  # type: ignore[method-assign]

    def reduce_implementation(
        self, reduce_op: Op, per_replica_value: DistributedValues, destinations: Any, options: Any
    ) -> Any:
        return self._combine(reduce_op, [component(per_replica_value)], options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: Op,
        value_destination_pairs: Sequence[tuple[DistributedValues, Any]],
        options: Any,
    ) -> Sequence[Any]:
        values = [component(value) for value, _ in value_destination_pairs]
        return self._combine(reduce_op, values, options, IN_PAIRS)

    def _compare(self, op: Op, form: Hashable, values: Sequence[Any], options: CommunicationOptions) -> None:
        """Compare values as `CrossDeviceOps._compare`, if one is not sent; else the reduction compares them."""
        if not values or any(isinstance(value, Mirrored) for value in values):
            super()._compare(op, form, values, options)

    def _combine(
        self, op: Op, values: list[Any], options: CommunicationOptions, form: Hashable = None
    ) -> list[Any]:
        """Combine plain values of this replica; sparse rows are gathered."""
        if set(map(type, values)) == _ONLY_ARRAYS:
            return self._reduce_arrays(op, values, options, form)
        kinds = tuple(map(structures.kind, values))
        hosted, on_gpu, sparse = (
            [i for i, each in enumerate(kinds) if each == kind]
            for kind in (structures.HOST, structures.GPU, structures.ROWS)
        )
        out: list[Any] = list(values)
        with structures.refusals("all_reduce", self._ranks, options.timeout_seconds):
            on_host = [arrays.to_host(values[i]) for i in hosted]
        if sparse or (hosted and on_gpu):  # several operations
            structures.agree(
                self._ranks, "all_reduce", op.name, form, kinds, timeout_seconds=options.timeout_seconds
            )
        if on_gpu:
            self._reduce_on_gpu(op, on_gpu, out, options, form)
        if hosted or not values:
            totals = self._reduce_arrays(op, on_host, options, form)
            for i, total in zip(hosted, totals, strict=True):
                out[i] = arrays.from_host(total, values[i])
        for i in sparse:
            out[i] = all_reduce_slices(self._ranks, op, values[i], options.timeout_seconds)
        return out

    all_reduce = _combine

    def _reduce_on_gpu(
        self, op: Op, where: list[int], out: list[Any], options: CommunicationOptions, form: Hashable
    ) -> None:
        """Replace the arrays of ``out`` at the indices ``where``, which are on a GPU, by their reductions."""
        from mpistrat.collectives.gpu import all_reduce as gpu_all_reduce  # most programs do not use a GPU

        values = [arrays.to_cupy(out[i]) for i in where]
        totals = gpu_all_reduce.all_reduce(
            self._ranks,
            op,
            values,
            self._bytes_per_pack(values, options),
            self._gpu_route(options),
            options.timeout_seconds,
            form,
        )
        for i, total in zip(where, totals, strict=True):
            out[i] = arrays.from_cupy(total, out[i])

    def _gpu_route(self, options: CommunicationOptions) -> str | None:
        """Return the name of the route for arrays on GPUs, or of an algorithm of the host; None for automatic."""
        ring = options.implementation is CommunicationImplementation.RING
        return self._algorithm or options.algorithm or ("pinned" if ring else None)

    def _bytes_per_pack(self, values: Sequence[Any], options: CommunicationOptions) -> int:
        return options.bytes_per_pack

    def _reduce_arrays(
        self,
        op: Op,
        values: Sequence[np.ndarray],
        options: CommunicationOptions,
        form: Hashable = None,
    ) -> list[np.ndarray]:
        topology = self._topology or self._ranks
        if self._arenas and not (len(values) == 1 and values[0].base is None):
            plan = self._plans_in_place.get(
                (op, form, self._algorithm or options.algorithm, *map(id, values))
            )
            if plan is not None and plan.is_for(values):
                arena_all_reduce.reduce(topology, plan, options.timeout_seconds)
                return list(values)
            homes = arena.homes(topology, values)
            if any(homes):
                return self._reduce_by_home(op, values, homes, options, form)
        return self._reduce_anew(topology, op, values, options, form)

    all_reduce_arrays = _reduce_arrays

    def all_reduce_array(self, op: Op, value: np.ndarray, options: CommunicationOptions) -> np.ndarray:
        """Combine one NumPy array of this replica, as `all_reduce_arrays` does."""
        algorithm = self._algorithm or options.algorithm
        small = self._small.get((op, None, options.bytes_per_pack, algorithm, value.dtype, value.shape))
        if small is None or value.base is not None or options.timeout_seconds is not None:
            return self._reduce_arrays(op, (value,), options)[0]
        return small(value)

    def _reduce_anew(
        self,
        topology: Topology,
        op: Op,
        values: Sequence[np.ndarray],
        options: CommunicationOptions,
        form: Hashable,
    ) -> list[np.ndarray]:
        algorithm = self._algorithm or options.algorithm
        # Two tuples hash faster than a tuple of pairs, which matters for hundreds of small arrays.
        key: tuple[Any, ...]
        if len(values) == 1:
            key = (op, form, options.bytes_per_pack, algorithm, values[0].dtype, values[0].shape)
            small = self._small.get(key)
            if small is not None and options.timeout_seconds is None:
                return [small(values[0])]
        else:
            key = (
                op,
                form,
                options.bytes_per_pack,
                algorithm,
                tuple(map(_dtype, values)),
                tuple(map(_shape, values)),
            )
            small = self._small.get(key)
            if small is not None and options.timeout_seconds is None:
                return small(values)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > 1024:
                self._plans.clear()
                self._small.clear()
            with structures.refusals("all_reduce", topology, options.timeout_seconds):
                plan = packing.plan(
                    topology,
                    op,
                    tuple((value.dtype, value.shape) for value in values),
                    self._bytes_per_pack(values, options),
                    algorithm,
                    form,
                )
            self._plans[key] = plan
            if small_all_reduce.supports(topology, plan):
                self._small[key] = small_all_reduce.prepare(topology, plan, tuple(map(_shape, values)))
        return packing.reduce_in_turn(topology, plan, values, options.timeout_seconds)

    def _reduce_by_home(
        self,
        op: Op,
        values: Sequence[np.ndarray],
        homes: Sequence[arena.Arena | None],
        options: CommunicationOptions,
        form: Hashable,
    ) -> list[np.ndarray]:
        """Reduce the arrays outside arenas, then the buffers in place, arena by arena."""
        topology, out = self._ranks, list(values)
        algorithm = self._algorithm or options.algorithm
        groups: dict[int, tuple[arena.Arena, list[np.ndarray]]] = {}
        rest = []
        for i, (value, home) in enumerate(zip(values, homes, strict=True)):
            if home is None or dtypes.result(value.dtype, op) != value.dtype:
                rest.append(i)
            else:
                groups.setdefault(home.number, (home, []))[1].append(value)
        if len(groups) + bool(rest) > 1:  # several operations
            places = tuple("elsewhere" if home is None else f"buffer of {home.number}" for home in homes)
            structures.agree(
                topology, "all_reduce", op.name, form, places, timeout_seconds=options.timeout_seconds
            )
        # The rest comes first: these arrays may be parts of the buffers.
        if rest:
            totals = self._reduce_anew(topology, op, [values[i] for i in rest], options, form)
            for i, total in zip(rest, totals, strict=True):
                out[i] = total
        for home, buffers in groups.values():
            key = (op, form, algorithm, *map(id, buffers))
            plan = self._plans_in_place.get(key)
            if plan is None or not plan.is_for(buffers):
                with structures.refusals("all_reduce", topology, options.timeout_seconds):
                    plan = arena_all_reduce.plan(topology, op, home, buffers, algorithm, form)
                if len(self._plans_in_place) > 1024:
                    self._plans_in_place.clear()
                self._plans_in_place[key] = plan
            arena_all_reduce.reduce(topology, plan, options.timeout_seconds)
        return out
