"""The all-reduce of arrays on GPUs, packed on the GPU and sent by the best route."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from mpistrat.collectives.arenas import arena
from mpistrat.collectives.gpu import packing as gpu_packing
from mpistrat.collectives.gpu.direct import GpuDirectRoute
from mpistrat.collectives.gpu.nccl import NcclRoute
from mpistrat.collectives.gpu.packing import PackedBucket
from mpistrat.collectives.gpu.pinned import PinnedRoute
from mpistrat.collectives.gpu.route import Route
from mpistrat.collectives.operations import Op
from mpistrat.runtime import arrays
from mpistrat.runtime.agreement.operation import Operation
from mpistrat.runtime.device import Device, cupy_for
from mpistrat.runtime.slot import Slot
from mpistrat.runtime.topology import Topology

# In the order of preference; the last one is always possible.
ROUTES: dict[str, Route] = {route.name: route for route in (NcclRoute(), GpuDirectRoute(), PinnedRoute())}


def all_reduce(
    topology: Topology,
    op: Op,
    values: Sequence[Any],
    bytes_per_pack: int = 0,
    name: str | None = None,
    timeout_seconds: float | None = None,
    form: Hashable = None,
) -> list[Any]:
    """Return new arrays with the reduction of CuPy arrays over the ranks; buffers are reduced in place.

    Parameters
    ----------
    topology : Topology
    op : ReduceOp or FurtherOp
    values : sequence of cupy.ndarray
        All on one GPU; of equal shapes and dtypes on all ranks.
    bytes_per_pack : int
        As in `CommunicationOptions`.
    name : str, optional
        The name of a route, or of an algorithm of the host, which uses the pinned route.
    timeout_seconds : float, optional
        As in `CommunicationOptions`.
    form : str, optional
        The form of the structure whose leaves the values are. The ranks compare it.

    Raises
    ------
    TypeError
        If one of the arrays cannot be reduced by ``op``.
    ValueError
        If the arrays are on several GPUs; on every rank, if shapes or dtypes differ between ranks.
    RuntimeError
        On every rank, if the ranks cannot use the route of this name.
    """
    if not values:
        return []
    device = arrays.require_one_device(values)
    cupy = cupy_for("an array on a GPU")
    key = tuple((value.dtype, tuple(value.shape)) for value in values)
    with cupy.cuda.Device(device.index):
        jobs, out, where = _jobs(topology, op, values, key, bytes_per_pack)
        operation = Operation(
            "all_reduce", op.name, "on GPUs", key, form, where, bytes_per_pack or None, name
        )
        groups = _by_route(topology, device, jobs, name, op)
        algorithm = None if name in ROUTES else name
        meets = bool(groups) and all(
            route.meets(topology, job.bucket, algorithm) for route, some in groups for job in some
        )
        with topology.turn(operation, meets, timeout_seconds):
            for route, some in groups:
                route.reduce(topology, device.index, some, algorithm, timeout_seconds)
        for job in jobs:
            if job.total is not job.message:
                gpu_packing.unpack(job.bucket, job.total, [shape for _, shape in key], out)
        for i, (_, shape) in enumerate(key):
            if out[i] is None:
                out[i] = cupy.empty(shape, gpu_packing.bucket(op, key, [i], topology.size).result)
    return out


def _jobs(
    topology: Topology, op: Op, values: Sequence[Any], key: gpu_packing.Key, bytes_per_pack: int
) -> tuple[list[PackedBucket], list[Any], tuple[Any, ...]]:
    """Return the messages, the list of results with the buffers filled in, and the places of buffers in arenas."""
    cupy = cupy_for("an array on a GPU")
    out: list[Any] = [None] * len(values)
    jobs: list[PackedBucket] = []
    rest, where = list(range(len(values))), ()
    if topology.slot(arena.Arenas):
        rest, where = _in_place(topology, op, values, out, jobs)
    rest_key = tuple(key[i] for i in rest)
    for each in gpu_packing.plan(op, rest_key, topology.size, bytes_per_pack):
        bucket = each._replace(members=tuple(rest[i] for i in each.members))
        jobs.append(
            PackedBucket(bucket, gpu_packing.pack(bucket, values), cupy.empty(bucket.length, bucket.result))
        )
    return jobs, out, where


def _in_place(
    topology: Topology, op: Op, values: Sequence[Any], out: list[Any], jobs: list[PackedBucket]
) -> tuple[list[int], tuple[Any, ...]]:
    """Add the buffers to ``out`` and ``jobs``, neighbours joined; return the indices of other arrays and the places."""
    homes: dict[int, tuple[arena.Arena, list[int]]] = {}
    rest: list[int] = []
    for i, (value, home) in enumerate(zip(values, arena.homes(topology, values), strict=True)):
        one = gpu_packing.bucket(op, ((value.dtype, tuple(value.shape)),), [0], topology.size)
        if home is None or one.result != one.source:
            rest.append(i)
        else:
            homes.setdefault(home.number, (home, []))[1].append(i)
            out[i] = value
    where: list[Any] = []
    for home, members in homes.values():
        stretches = arena.stretches(home, [values[i] for i in members])
        pieces = tuple((each.offset, each.length, each.dtype.str) for each in stretches)
        where.append((home.number, tuple(members), pieces))
        for each in stretches:
            (flat,) = arena.rows(home, each, 1)
            bucket = gpu_packing.bucket(op, ((each.dtype, (each.length,)),), [0], topology.size)
            jobs.append(PackedBucket(bucket, flat, flat))
    return rest, tuple(where)


class Obstacles(dict[int, dict[str, str]], Slot):
    """The reason why a route cannot be used, by GPU and name of the route; empty if it can."""


def _obstacle(topology: Topology, device: Device, name: str) -> str:
    """Return why the ranks cannot use a route, determined at the first call. Collective."""
    known = topology.slot(Obstacles).setdefault(device.index, {})
    if name not in known:
        if type(ROUTES[name]).obstacle is Route.obstacle:
            known[name] = ""
        else:
            with topology.turn(Operation("the way of arrays on GPUs", name)):
                known[name] = ROUTES[name].obstacle(topology, device.index)
    return known[name]


def _by_route(
    topology: Topology, device: Device, jobs: Sequence[PackedBucket], name: str | None, op: Op
) -> list[tuple[Route, list[PackedBucket]]]:
    """Return the jobs of each route. A job uses the first possible route, or the one with this name."""
    if topology.size == 1:
        return [(_Alone(), list(jobs))] if jobs else []
    wanted = [name] if name in ROUTES else list(ROUTES) if name is None else ["pinned"]
    if name in ROUTES and _obstacle(topology, device, name):
        raise RuntimeError(
            f"arrays on GPUs cannot be reduced by {name!r}: {_obstacle(topology, device, name)}"
        )
    groups: dict[str, list[PackedBucket]] = {}
    for job in jobs:
        for each in wanted:
            if ROUTES[each].supports(job.bucket.wire, job.bucket.combine) and not _obstacle(
                topology, device, each
            ):
                groups.setdefault(each, []).append(job)
                break
        else:
            raise RuntimeError(
                f"{name!r} has no {op.name} of {job.bucket.source} on GPUs: leave the route to AUTO"
            )
    return [(ROUTES[each], some) for each, some in groups.items()]


class _Alone(Route):
    """The route of a single replica, whose result is its value."""

    name = "identity"

    def reduce(
        self,
        topology: Topology,
        device: int,
        jobs: Sequence[PackedBucket],
        algorithm: str | None,
        timeout_seconds: float | None,
    ) -> None:
        for job in jobs:
            if job.total is not job.message:
                gpu_packing.finish(job, gpu_packing.widened(job))


def obstacles(topology: Topology, device: Device) -> dict[str, str]:
    """Return why the ranks cannot use each route, in the order of preference; empty if they can. Collective."""
    if topology.size == 1:
        return dict.fromkeys(ROUTES, "")
    return {name: _obstacle(topology, device, name) for name in ROUTES}
