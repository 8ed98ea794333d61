"""The all-reduce of arrays on GPUs, packed on the GPU and sent by the best route."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays.device import Device, cupy_for, on_device
from mpistrat.arrays.gpu.pinned import CHUNK_BYTES, StagedCopy, staging, through_host
from mpistrat.collectives import arena
from mpistrat.collectives.algorithms.choose import Candidate, Choice
from mpistrat.collectives.gpu import pointers as gpu_pointers
from mpistrat.collectives.gpu.nccl import NcclRoute
from mpistrat.collectives.gpu.route import (
    GpuCall,
    MessageLayout,
    PackedMessage,
    Route,
    combine_on_gpu,
    pack_values,
    packed_for_gpu,
    unpack,
    widened,
)
from mpistrat.collectives.operations import Op, finish
from mpistrat.collectives.reduction import Key, Message, Reduction, Steps, message_of, new_reduction, reduce_piece
from mpistrat.record.layout import Kind
from mpistrat.record.ring import timed
from mpistrat.runtime.agreement.operation import Operation
from mpistrat.runtime.environment import rc
from mpistrat.runtime.topology import Slot, Topology


class GpuDirectRoute(Route):
    """The route of all-to-all, sums of one part on each rank's GPU, and all-gather."""

    name = "gpu_direct"

    def obstacle(self, topology: Topology, device: int) -> str:
        reasons = gpu_pointers.obstacles(topology, device)
        return reasons["Alltoall"] or reasons["Allgather"]

    def supports(self, wire: np.dtype, combine: np.ufunc) -> bool:
        return wire.kind in "iufc"

    def reduce(self, call: GpuCall, jobs: Sequence[PackedMessage]) -> None:
        cupy = cupy_for("arrays on GPUs")
        topology = call.topology
        with gpu_pointers.scratch(call.device) as memory:
            for job in jobs:
                message = widened(job)
                wide = job.total if job.total.dtype == message.dtype else cupy.empty_like(message)
                # A multiple of the ranks, so that each combines an equal part of a piece without a rest.
                step = gpu_pointers.PIECE_BYTES // topology.size // message.itemsize * topology.size
                for start in range(0, len(message), step):
                    part = slice(start, start + step)
                    _reduce_piece(topology, memory, job.message.combine, message[part], wide[part])
                finish(wide, job.message.divisor, job.total)


def _reduce_piece(
    topology: Topology, memory: gpu_pointers.Scratch, combine: np.ufunc, message: Any, total: Any
) -> None:
    size, dtype = topology.size, message.dtype
    count = -(-len(message) // size)
    send, receive = (buffer[: size * count * dtype.itemsize].view(dtype) for buffer in (memory.send, memory.receive))
    # What an earlier piece left after a short one is combined too, and not read from the result.
    send[: len(message)] = message
    gpu_pointers.all_to_all(topology, send, receive)
    # All parts were sent, so the memory of the first takes this rank's total: no third buffer is needed.
    own_part = send[:count]
    combine_on_gpu(combine, list(receive.reshape(size, count)), own_part)
    gpu_pointers.all_gather(topology, own_part, receive)
    total[...] = receive[: len(message)]


class PinnedRoute(Route):
    """The route through the host, which overlaps the copies to and from it with the combination.

    It works for any ranks, MPI library and dtype, with the same bits as the host's algorithm.
    """

    name = "pinned"

    def meets(self, topology: Topology, message: Message, algorithm: str | None) -> bool:
        return _best(topology, message, algorithm).algorithm.meets

    def reduce(self, call: GpuCall, jobs: Sequence[PackedMessage]) -> None:
        pieces: list[StagedCopy] = []
        for job in jobs:
            pieces += _pieces(call.topology, job, call.algorithm)
        with staging(call.device) as stage:
            through_host(stage, pieces)


def _best(topology: Topology, message: Message, name: str | None) -> Candidate:
    return Choice.of(topology).best(message.length * message.wire.itemsize, message.wire, name)


def _pieces(topology: Topology, job: PackedMessage, name: str | None) -> list[StagedCopy]:
    message = job.message
    algorithm, _, piece_bytes = _best(topology, message, name)
    source, result = message.source, message.result
    # A chunk of pinned memory must hold a piece in each of its dtypes.
    widest = max(dtype.itemsize for dtype in (source, message.wire, result))
    step = max(1, min(piece_bytes, CHUNK_BYTES) // widest)
    start_of_source, start_of_total = int(job.send.data.ptr), int(job.total.data.ptr)

    def work(down: np.ndarray, up: np.ndarray) -> np.ndarray:
        send = down.view(source)
        if source is message.wire is result:
            reduce_piece(topology, message, algorithm, send, send)
            return down
        into = up[: len(send) * result.itemsize]
        reduce_piece(topology, message, algorithm, send, into.view(result))
        return into

    return [
        StagedCopy(
            start_of_source + start * source.itemsize,
            min(step, message.length - start) * source.itemsize,
            work,
            start_of_total + start * result.itemsize,
        )
        for start in range(0, message.length, step)
    ]


# In the order of preference; the last one is always possible.
ROUTES: dict[str, Route] = {route.name: route for route in (NcclRoute(), GpuDirectRoute(), PinnedRoute())}

_InPlace = list[tuple[arena.Arena, arena.ArenaSpan, Message]]


def reduction_on_gpu(
    topology: Topology,
    op: Op,
    values: Sequence[Any],
    device: Device,
    bytes_per_pack: int = 0,
    name: str | None = None,
    form: Hashable = None,
) -> Reduction:
    """Prepare the all-reduce of CuPy arrays on one GPU. Buffers are reduced in place, for these objects only.

    ``name`` is a route, or an algorithm of the host, which uses the pinned route. The ranks compare
    ``form``. Raise TypeError if ``op`` cannot reduce an array, and RuntimeError on every rank if they cannot use the
    route of this name.
    """
    cupy = cupy_for("an array on a GPU")
    key = tuple((value.dtype, tuple(value.shape)) for value in values)
    in_place, rest, compared = _in_place(topology, op, values, key)
    packed = [
        message._replace(members=tuple(rest[i] for i in message.members))
        for message in packed_for_gpu(op, tuple(key[i] for i in rest), topology.size, bytes_per_pack)
    ]
    filled = {i for message in packed for i in message.members}
    empty = [(i, message_of(op, key, [i], topology.size).result) for i in rest if i not in filled]
    buffers = [i for i in range(len(values)) if i not in rest]
    half = rc.nccl_half
    parts = key, form, compared, bytes_per_pack or None, name, "in half precision" if half else None
    operation = Operation("all_reduce", op.name, "on GPUs", *parts)
    messages = [message for *_, message in in_place] + packed
    layouts = [MessageLayout.of(message) for message in packed]
    with on_device(device.index):
        groups = _by_route(topology, device, messages, name, op)
    algorithm = None if name in ROUTES else name
    meets = bool(groups) and all(
        route.meets(topology, messages[i], algorithm) for route, indices in groups for i in indices
    )

    def pack_all(values: Sequence[Any]) -> tuple[Sequence[Any], list[PackedMessage]]:
        jobs = []
        with on_device(device.index):
            for region, span, message in in_place:
                (flat,) = arena.rows_at(region, span, 1)
                jobs.append(PackedMessage(message, flat, flat))
            jobs += [pack_values(layout, values) for layout in layouts]
        return values, jobs

    def combine(
        state: tuple[Sequence[Any], list[PackedMessage]], timeout_seconds: float | None
    ) -> tuple[Sequence[Any], list[PackedMessage]]:
        with on_device(device.index):
            call = GpuCall(topology, device.index, algorithm, timeout_seconds, half)
            for route, indices in groups:
                route.reduce(call, [state[1][i] for i in indices])
        return state

    def unpack_values(state: tuple[Sequence[Any], list[PackedMessage]]) -> list[Any]:
        values, jobs = state
        out: list[Any] = [None] * len(values)
        with on_device(device.index):
            for layout, job in zip(layouts, jobs[len(in_place) :], strict=True):
                unpack(layout, job.total, out)
            for i, dtype in empty:
                out[i] = cupy.empty(key[i][1], dtype)
        for i in buffers:
            out[i] = values[i]
        return out

    pack, give = timed(Kind.REDUCE_PACK, pack_all), timed(Kind.REDUCE_UNPACK, unpack_values)
    steps = Steps(pack, combine, give, meets)
    # The plan has addresses in an arena, so other arrays of the same shapes need another.
    only_for = tuple(map(weakref.ref, values)) if in_place else ()
    return new_reduction(topology, operation, steps, only_for=only_for)


def _in_place(
    topology: Topology, op: Op, values: Sequence[Any], key: Key
) -> tuple[_InPlace, list[int], tuple[Any, ...]]:
    """Return the buffers, neighbours joined; the indices of the other arrays; and the layout that ranks compare."""
    in_place: _InPlace = []
    if not topology.slot(arena.Arenas):
        return in_place, list(range(len(values))), ()
    regions: dict[int, tuple[arena.Arena, list[int]]] = {}
    rest: list[int] = []
    for i, region in enumerate(arena.arenas_of(topology, values)):
        one = message_of(op, key, [i], topology.size)
        if region is None or one.result != one.source:
            rest.append(i)
        else:
            regions.setdefault(region.number, (region, []))[1].append(i)
    compared: list[Any] = []
    for region, members in regions.values():
        spans = arena.spans_of(region, [values[i] for i in members])
        pieces = tuple((span.offset, span.length, span.dtype.str) for span in spans)
        compared.append((region.number, tuple(members), pieces))
        for span in spans:
            message = message_of(op, ((span.dtype, (span.length,)),), [0], topology.size)
            in_place.append((region, span, message))
    return in_place, rest, tuple(compared)


class Obstacles(dict[int, dict[str, str]], Slot):
    """The reason why a route cannot be used, by GPU and name of the route; empty if it can."""


def _obstacle(topology: Topology, device: Device, name: str) -> str:
    """Return why the ranks cannot use a route, determined at the first call. Collective."""
    known = topology.slot(Obstacles).setdefault(device.index, {})
    if name not in known:
        # A route without an own obstacle is possible on every rank, so that nothing is to be compared.
        if type(ROUTES[name]).obstacle is Route.obstacle:
            known[name] = ""
        else:
            with topology.lock.collective(Operation("the way of arrays on GPUs", name)):
                known[name] = ROUTES[name].obstacle(topology, device.index)
    return known[name]


def _by_route(
    topology: Topology, device: Device, messages: Sequence[Message], name: str | None, op: Op
) -> list[tuple[Route, list[int]]]:
    """Return the messages of each route. A message uses the first possible route, or the one with this name."""
    if topology.size == 1:
        return [(_SingleReplicaRoute(), list(range(len(messages))))] if messages else []
    names = [name] if name in ROUTES else list(ROUTES) if name is None else ["pinned"]
    # AUTO goes on to the next route. A route that a program names must not be replaced in silence.
    if name in ROUTES and _obstacle(topology, device, name):
        raise RuntimeError(f"arrays on GPUs cannot be reduced by {name!r}: {_obstacle(topology, device, name)}")
    groups: dict[str, list[int]] = {}
    for i, message in enumerate(messages):
        for candidate in names:
            if ROUTES[candidate].supports(message.wire, message.combine) and not _obstacle(topology, device, candidate):
                groups.setdefault(candidate, []).append(i)
                break
        else:
            raise RuntimeError(f"{name!r} has no {op.name} of {message.source} on GPUs: leave the route to AUTO")
    return [(ROUTES[candidate], indices) for candidate, indices in groups.items()]


class _SingleReplicaRoute(Route):
    """The route of a single replica, whose result is its value."""

    name = "identity"

    def reduce(self, call: GpuCall, jobs: Sequence[PackedMessage]) -> None:
        for job in jobs:
            if job.total is not job.send:
                finish(widened(job), job.message.divisor, job.total)


def obstacles(topology: Topology, device: Device) -> dict[str, str]:
    """Return why the ranks cannot use each route, in the order of preference; empty if they can. Collective."""
    if topology.size == 1:
        return dict.fromkeys(ROUTES, "")
    return {name: _obstacle(topology, device, name) for name in ROUTES}
