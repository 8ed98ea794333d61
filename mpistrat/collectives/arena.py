"""Arenas: memory shared by the ranks of a node, whose arrays are reduced in place."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat import nest
from mpistrat.arrays import arrays
from mpistrat.arrays.device import Device, cupy_for, on_device
from mpistrat.collectives import structures
from mpistrat.collectives.algorithms.choose import IN_PLACE, Choice
from mpistrat.collectives.algorithms.hierarchical import InMemory, segmented_ring_all_reduce
from mpistrat.collectives.algorithms.tree import combine_rows
from mpistrat.collectives.operations import Op, finish
from mpistrat.collectives.reduction import (
    FastPath,
    HostRoute,
    Message,
    Reduction,
    Steps,
    fast_path_of,
    new_reduction,
    packed_for_host,
    reduce_one,
)
from mpistrat.memory.node import NoSharedMemoryError, pages, share
from mpistrat.process import mpi, private_file
from mpistrat.runtime.agreement.operation import Operation, operation
from mpistrat.runtime.topology import Slot, Topology
from mpistrat.values import component

_ALIGNMENT = 64  # a cache line
_log = logging.getLogger(__name__)
_MAP_FIXED = 0x10  # of Linux; the module mmap does not have it


class Arena(NamedTuple):
    """The place of some buffers in memory. The arrays keep the memory alive."""

    number: int  # the number of the collective that made the arena: the same on all ranks
    memory: weakref.ref[np.ndarray]  # the base of all arrays of the arena
    stride: int  # bytes from one local rank's buffers to the next one's
    start: int  # the byte at which the buffers of this rank begin
    shared: bool  # whether the other ranks of the node see the memory


class Arenas(dict[int, Arena], Slot):
    """The arenas of a topology, by the identity of their memory."""


class ArenaSpan(NamedTuple):
    """Consecutive elements of one dtype in an arena. The offset counts from the start of a rank's buffers."""

    offset: int
    length: int
    dtype: np.dtype


def buffers(
    topology: Topology,
    leaves: Sequence[tuple[np.dtype, tuple[int, ...]]],
    device: Device = Device("cpu"),  # noqa: B008 - a tuple
    form: Hashable = None,
) -> list[Any]:
    """Return arrays of zeros of these dtypes and shapes, in one arena. Collective; the ranks compare ``form``.

    On a GPU they lie side by side: one message without packing. Raise TypeError if a dtype holds Python objects.
    """
    with structures.refusals("experimental_buffers_like", topology):
        for dtype, _ in leaves:
            if dtype.hasobject:
                raise TypeError(f"buffers cannot hold Python objects ({dtype})")
    with topology.lock.collective(operation("experimental_buffers_like", tuple(leaves), form, device.kind)):
        # Arrays of one dtype lie side by side without gaps, so that they are reduced as one span.
        order = sorted(range(len(leaves)), key=lambda i: leaves[i][0].str)
        offsets, end = [0] * len(leaves), 0
        before = None
        for i in order:
            dtype, shape = leaves[i]
            offsets[i] = end = end if dtype == before else -(-end // _ALIGNMENT) * _ALIGNMENT
            end += math.prod(shape) * dtype.itemsize
            before = dtype
        region = _shared(topology, max(end, 1)) if device.kind == "cpu" else None
    # After the lock is released: a rank that is out of memory then fails without keeping other ranks waiting.
    memory, stride, start, shared = region or _private(max(end, 1), device)
    _add(topology, Arena(topology.lock.sequence, weakref.ref(memory), stride, start, shared))
    views = []
    for offset, (dtype, shape) in zip(offsets, leaves, strict=True):
        data = memory[start + offset : start + offset + math.prod(shape) * dtype.itemsize]
        views.append(data.view(dtype).reshape(shape))
    return views


def buffer_on_file(topology: Topology, descriptor: int | None, dtype: np.dtype, count: int) -> np.ndarray | None:
    """Return the content of each rank's file in memory as a flat array in an arena. Collective.

    ``descriptor`` is this rank's open file, or None. Return None on all ranks if a node's ranks cannot map all files.
    """
    nbytes = count * dtype.itemsize
    with topology.lock.collective(operation("buffer on a file", dtype.str, count)):
        memory = None
        if topology.memory is not None:
            with contextlib.suppress(NoSharedMemoryError):
                memory = map_side_by_side(topology.node, descriptor, nbytes)
        if not topology.world.allreduce(memory is not None, mpi.start().LAND):
            return None
    assert memory is not None
    stride = len(memory) // topology.node.size
    start = topology.node.rank * stride
    _add(topology, Arena(topology.lock.sequence, weakref.ref(memory), stride, start, True))
    return memory[start : start + nbytes].view(dtype)


def _add(topology: Topology, arena: Arena) -> None:
    """Let reductions find an arena by its memory, for as long as this exists."""
    arenas, memory = topology.slot(Arenas), arena.memory()
    arenas[id(memory)] = arena
    # Another array may get the same id, and must not be taken for a buffer.
    weakref.finalize(memory, arenas.pop, id(memory), None)


def _shared(topology: Topology, nbytes: int) -> tuple[Any, int, int, bool] | None:
    if topology.memory is not None:
        shared = None
        try:
            shared = share(topology.node, nbytes)
        except NoSharedMemoryError as error:
            if topology.node.rank == 0:
                _log.warning("%s; buffers are in private memory and reduced more slowly", error)
        if topology.world.allreduce(shared is not None, mpi.start().LAND):
            assert shared is not None
            rows = shared.rows
            return rows.base, rows.shape[1], topology.node.rank * rows.shape[1], True
    return None


def _private(nbytes: int, device: Device) -> tuple[Any, int, int, bool]:
    if device.kind != "cpu":
        cupy = cupy_for("buffers")
        with on_device(device.index):
            return cupy.zeros(nbytes, np.uint8), 0, 0, False
    return np.zeros(nbytes + _ALIGNMENT, np.uint8), 0, 0, False


def arenas_of(topology: Topology, values: Sequence[np.ndarray]) -> list[Arena | None]:
    """Return the arena of each array; None for an array outside all arenas or not contiguous."""
    arenas = topology.slot(Arenas)
    by_base = [arenas.get(id(value.base)) for value in values]
    return [
        arena if arena is None or value.flags.c_contiguous else None
        for arena, value in zip(by_base, values, strict=True)
    ]


def offsets_of(arena: Arena, values: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Return the first byte of each array, counted from the start of this rank's buffers; 0 if it is empty."""
    origin = _address(arena.memory()) + arena.start
    return tuple(_address(value) - origin if value.size else 0 for value in values)


def spans_of(arena: Arena, values: Sequence[np.ndarray]) -> tuple[ArenaSpan, ...]:
    """Return the spans of an arena's arrays, neighbours of one dtype joined. Raise ValueError if two overlap."""
    pieces = sorted(
        (start, value.size, value.dtype)
        for start, value in zip(offsets_of(arena, values), values, strict=True)
        if value.size
    )
    joined: list[ArenaSpan] = []
    for offset, count, dtype in pieces:
        last = joined[-1] if joined else None
        gap = offset - (last.offset + last.length * last.dtype.itemsize) if last else 0
        if gap < 0:
            raise ValueError("two of the buffers to be reduced overlap: give each once")
        if last and last.dtype == dtype and gap == 0:
            joined[-1] = ArenaSpan(last.offset, last.length + count, dtype)
        else:
            joined.append(ArenaSpan(offset, count, dtype))
    return tuple(joined)


def rows_at(arena: Arena, span: ArenaSpan, ranks: int) -> list[np.ndarray]:
    """Return the elements of each rank of the node at a span; only this rank's if the memory is private."""
    memory: Any = arena.memory()
    starts = range(span.offset, ranks * arena.stride, arena.stride) if arena.shared else (span.offset,)
    nbytes = span.length * span.dtype.itemsize
    return [memory[start : start + nbytes].view(span.dtype) for start in starts]


def offset(array: np.ndarray) -> int:
    """Return the bytes between the start of an array and the start of its base."""
    return _address(array) - _address(array.base)


def _address(array: Any) -> int:
    described = getattr(array, "__array_interface__", None) or array.__cuda_array_interface__
    return described["data"][0]


def buffers_like(tree: Any, topology: Topology, own_device: Device) -> Any:
    """Return zeroed arrays like the leaves of a structure, in memory that the ranks of a node share. Collective.

    Raise ValueError on every rank if structures, shapes or dtypes differ between ranks or only some arrays live on a
    GPU, and TypeError if an array holds Python objects.
    """
    leaves, rebuild, form = nest.take_apart(tree)
    with structures.refusals("experimental_buffers_like", topology):
        for leaf in leaves:
            arrays.refuse_masked(component(leaf))
        like = [arrays.dtype_and_shape(leaf) for leaf in leaves]
        on_gpu = [arrays.to_cupy(component(leaf)) for leaf in leaves if arrays.on_gpu(component(leaf))]
        if on_gpu and len(on_gpu) < len(leaves):
            raise ValueError(f"{len(on_gpu)} of {len(leaves)} arrays live on a GPU: make the buffers of these apart")
        device = arrays.require_one_device(on_gpu, own_device) if on_gpu else Device("cpu")
    zeroed = buffers(topology, like, device, form)
    return rebuild([arrays.buffer_like(array, leaf) for array, leaf in zip(zeroed, leaves, strict=True)])


def map_side_by_side(node: Any, descriptor: int | None, nbytes: int) -> np.ndarray:
    """Map a file of each rank, and return the bytes of all, each in whole pages. Collective over ``node``.

    `share` makes one file for all ranks. Here each rank has a file already, which another library made: memory
    of PyTorch, for example.

    ``descriptor`` is an open file in memory of ``nbytes``, whose pages are reserved, or None. Raise NoSharedMemoryError
    on every rank if a rank has no file, or cannot open another rank's.
    """
    own_file = None
    if descriptor is not None:
        own_file = f"/proc/{os.getpid()}/fd/{descriptor}", _identity(descriptor)
    files = node.allgather(own_file)
    error: Exception | None = None
    step = pages(nbytes)
    try:
        memory = np.frombuffer(mmap.mmap(-1, node.size * step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        for rank, file in enumerate(files):
            if file is None:
                raise OSError(f"rank {rank} of the node does not have a file")
            _map_over(memory[rank * step :], step, *file)
    except (OSError, ValueError) as problem:  # mmap raises these where the address space is limited
        error = problem
    problems = private_file.on_all_ranks(node, error)
    if problems:
        raise NoSharedMemoryError(f"{node.size} ranks of a node cannot map each other's files: {problems[0]}")
    return memory


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _map_over(memory: np.ndarray, nbytes: int, path: str, identity: tuple[int, int]) -> None:
    """Map a file over the first bytes of an array that is mapped itself. They are unmapped with the array."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if _identity(descriptor) != identity:
            raise OSError("another file was opened: the ranks do not see the same processes")
        # The C function, because Python's mmap does not map at a given address.
        function = ctypes.CDLL(None, use_errno=True).mmap
        function.restype = ctypes.c_void_p
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        address = memory.ctypes.data
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if function(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) != address:
            raise OSError(ctypes.get_errno(), "mmap failed")
    finally:
        os.close(descriptor)


# --- the all-reduce in place: without packing, and inside a node without copies -


_BLOCK_BYTES = 128 << 10  # stays in the cache between a sum and its copies


class ReducedSpan(NamedTuple):
    """A span of an arena, which is one message, and the way of its reduction."""

    span: ArenaSpan
    message: Message
    route: HostRoute


class OwnSlice(NamedTuple):
    """Elements that this rank combines, in the buffers of all ranks of the node and in its own."""

    rows: list[np.ndarray]
    total: np.ndarray
    others: list[np.ndarray]


def reduction_in_place(
    topology: Topology,
    choice: Choice,
    op: Op,
    arena: Arena,
    values: Sequence[np.ndarray],
    algorithm: str | None,
    form: Hashable,
) -> Reduction:
    """Prepare the all-reduce of some buffers of one arena. It is valid for these objects only.

    Buffers that cannot be combined in shared memory go through copies, after the others. The ranks compare ``form``.
    Raise ValueError if two buffers overlap.
    """
    parts = [_reduced_span(topology, choice, op, arena, span, algorithm) for span in spans_of(arena, values)]
    in_place = _InSharedMemory(topology, arena, [part for part in parts if _is_in_place(arena, part)])
    copied = _ThroughCopies(topology, arena, [part for part in parts if not _is_in_place(arena, part)])
    spans = tuple((span.offset, span.length, span.dtype.str) for span, _, _ in (*in_place.parts, *copied.parts))
    layout = offsets_of(arena, values), spans, len(in_place.parts)
    operation = Operation("all_reduce", op.name, "of buffers", arena.number, form, *layout, algorithm)

    def drop_views(_: object) -> None:  # they would keep the memory alive
        in_place.views.clear()
        copied.views.clear()

    def pack_values(values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        in_place.make_views()
        copied.make_views()
        return values

    def combine(values: Any, timeout_seconds: float | None) -> Any:
        if in_place.parts:
            in_place.reduce()
            topology.lock.is_shared_memory_only = copied.is_shared_memory_only
        copied.reduce()
        return values

    fast_path = in_place.fast_path() if not copied.parts else copied.fast_path() if not in_place.parts else None
    steps = Steps(pack_values, combine, list, meets=bool(in_place.parts) or copied.is_shared_memory_only)
    buffers = tuple(weakref.ref(value, drop_views) for value in values)
    return new_reduction(topology, operation, steps, fast_path, buffers)


def _reduced_span(
    topology: Topology, choice: Choice, op: Op, arena: Arena, span: ArenaSpan, algorithm: str | None
) -> ReducedSpan:
    """Return the part of a span: as for any array, unless the reduction in place is predicted to be faster."""
    key = ((span.dtype, (span.length,)),)
    (message,) = packed_for_host(topology, choice, op, key, 0, algorithm)
    route = HostRoute.of(choice, message, algorithm)
    nbytes = span.length * message.wire.itemsize
    predicts = algorithm is None and arena.shared and not choice.measured and topology.size > 1
    if predicts and choice.in_place_is_faster(nbytes, route.algorithm):
        route = HostRoute.of(choice, message, IN_PLACE)
    return ReducedSpan(span, message, route)


def _is_in_place(arena: Arena, part: ReducedSpan) -> bool:
    """Return whether a part is reduced in place: not if its values are widened or another algorithm is faster."""
    return arena.shared and part.route.algorithm.in_place and part.message.wire is part.message.source


class _InSharedMemory:
    """The parts of which each rank combines a slice, in the buffers of its node, then on the rail of its local rank."""

    def __init__(self, topology: Topology, arena: Arena, parts: Sequence[ReducedSpan]):
        self._topology, self._arena, self.parts = topology, arena, parts
        self.views: list[tuple[Message, list[OwnSlice]]] = []

    def make_views(self) -> None:
        """Cut this rank's slices into blocks, at the first use."""
        topology = self._topology
        if not self.views:
            for span, message, _ in self.parts:
                rows = rows_at(self._arena, span, topology.node.size)
                self.views.append((message, _slice(topology, rows)))

    def fast_path(self) -> FastPath | None:
        topology = self._topology
        if len(topology.nodes) > 1 or topology.memory is None:
            return None

        meet = topology.memory.barrier_with_token

        def exchange(values: Sequence[np.ndarray], token: int) -> list[np.ndarray] | None:
            if not self.views:
                self.make_views()
            if not meet(token):
                return None
            topology.lock.ignoring_float_errors(self._combine_on_node)
            return list(values)

        return FastPath(exchange, meet)

    def reduce(self) -> None:
        topology = self._topology
        topology.lock.meet()
        if len(topology.nodes) == 1:
            self._combine_on_node()
        else:
            for message, blocks in self.views:
                for block in blocks:
                    _combine_between_nodes(topology, message, block)
        topology.lock.meet()

    def _combine_on_node(self) -> None:
        for message, blocks in self.views:
            for rows, total, others in blocks:
                combine_rows(message.combine, rows, total)
                finish(total, message.divisor, total)
                for other in others:
                    other[...] = total


def _slice(topology: Topology, rows: list[np.ndarray]) -> list[OwnSlice]:
    rank, length = topology.node.rank, len(rows[0])
    one_node = len(topology.nodes) == 1
    slices = len(rows) if one_node else min(topology.ranks_per_node)
    if rank >= slices:
        return []
    last = length * (rank + 1) // slices
    step = max(1, _BLOCK_BYTES // rows[0].itemsize if one_node else length)
    blocks = []
    for start in range(length * rank // slices, last, step):
        parts = [row[start : min(start + step, last)] for row in rows]
        blocks.append(OwnSlice(parts, parts[rank], parts[:rank] + parts[rank + 1 :]))
    return blocks


def _combine_between_nodes(topology: Topology, message: Message, slices: OwnSlice) -> None:
    rows, total, others = slices

    def reduce_on_node(segment: slice) -> None:
        combine_rows(message.combine, [row[segment] for row in rows], total[segment])

    def divide(segment: slice) -> None:
        finish(total[segment], message.divisor, total[segment])

    def copy_out(segment: slice) -> None:
        for other in others:
            other[segment] = total[segment]

    hooks = InMemory(reduce_on_node, divide, copy_out)
    segmented_ring_all_reduce(topology.rail, message.combine, total, topology.limits.segment_bytes, hooks)


class _ThroughCopies:
    """The parts that are reduced as any other array, after which the result is copied back."""

    def __init__(self, topology: Topology, arena: Arena, parts: Sequence[ReducedSpan]):
        self._topology, self._arena, self.parts = topology, arena, parts
        self.views: list[np.ndarray] = []
        self.is_shared_memory_only = bool(parts) and all(part.route.algorithm.meets for part in parts)

    def make_views(self) -> None:
        """Make the views of this rank's elements of each part, at the first use."""
        if not self.views:
            arena, node = self._arena, self._topology.node
            rank, ranks = (node.rank, node.size) if arena.shared else (0, 1)
            self.views += [rows_at(arena, part.span, ranks)[rank] for part in self.parts]

    def fast_path(self) -> FastPath | None:
        if len(self.parts) != 1:
            return None
        ((_, message, route),) = self.parts
        steps = fast_path_of(self._topology, message, route)
        if steps is None:
            return None
        exchange_own = steps.exchange

        def exchange(values: Sequence[np.ndarray], token: int) -> list[np.ndarray] | None:
            self.make_views()
            totals = exchange_own(self.views, token)
            if totals is None:
                return None
            self.views[0][...] = totals[0]
            return list(values)

        return FastPath(exchange)

    def reduce(self) -> None:
        for view, (_, message, route) in zip(self.views, self.parts, strict=True):
            view[...] = reduce_one(self._topology, message, route, view)
