"""The routes of arrays on GPUs, the ways to reduce them, and what they share: packing, and sums of ranks' rows."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays.device import cupy_for, gpu_count, on_device, seen_gpus
from mpistrat.arrays.gpu.kernels import EachElement, copy_bytes
from mpistrat.collectives.operations import Op, finish
from mpistrat.collectives.reduction import Key, Message, MessageSizes, packed_messages
from mpistrat.process.waiting import Backoff
from mpistrat.runtime.agreement.operation import ranks_in_words
from mpistrat.runtime.topology import Slot, Topology

PACK_BYTES = 64 << 20  # of a message of several arrays
_ALONE_BYTES = 8 << 20  # a larger array is a message of its own
_SMALL = 1 << 10  # elements; of a longer message a number is copied: a view would keep it all


class Laid(NamedTuple):
    """A message on the GPU: the flat array to send and the one for its reduction, of one length; may be the same."""

    message: Message
    send: Any
    total: Any


class Places(NamedTuple):
    """The places of the arrays of a message, worked out once for all calls."""

    message: Message
    sizes: list[int]  # of each array, in elements
    sent: list[int]  # the first byte of each array in the message
    # for each array: its index in the list, its first byte in the result, and its shape
    given: list[tuple[int, int, tuple[int, ...]]]
    copied: bool  # whether a number is copied out of the result

    @classmethod
    def of(cls, message: Message) -> Places:
        shapes = [shape for _, count, shape in message.runs for _ in range(count)]
        sizes = [math.prod(shape) for shape in shapes]
        starts = [*itertools.accumulate(sizes, initial=0)][:-1]
        width = message.result.itemsize
        given = [*zip(message.members, [width * start for start in starts], shapes, strict=True)]
        sent = [message.source.itemsize * start for start in starts]
        return cls(message, sizes, sent, given, message.length > _SMALL and 1 in sizes)


def packed_for_gpu(op: Op, key: Key, size: int, bytes_per_pack: int = 0) -> tuple[Message, ...]:
    """Return the messages of arrays of these dtypes and shapes. Raise TypeError if ``op`` cannot reduce one of them."""
    limits = MessageSizes(_ALONE_BYTES, math.inf, bytes_per_pack or PACK_BYTES)
    return packed_messages(op, key, size, {dtype: limits for dtype, _ in key})


def pack_values(places: Places, arrays: Sequence[Any]) -> Laid:
    """Return the arrays of a message as one, copied in one launch if they are several, and memory for the result."""
    cupy, message = cupy_for("an array on a GPU"), places.message
    mine = [cupy.ascontiguousarray(arrays[i]) for i in message.members]
    if len(mine) == 1:
        send = mine[0].reshape(-1)
    else:
        send = cupy.empty(message.length, message.source)
        start = send.data.ptr
        pointers = [each.data.ptr for each in mine] + [start + first for first in places.sent]
        copy_bytes(pointers, places.sizes, message.source, send.device.id)
    return Laid(message, send, cupy.empty(message.length, message.result))


def unpack(places: Places, total: Any, out: list[Any]) -> None:
    """Put arrays on the memory of a flat result into ``out`` at the indices of the message's members."""
    # CuPy looks up a class faster than a dtype, by 0.12 us of 0.9. A view of a slice takes 1.2 us.
    new, start, dtype = type(total), total.data, total.dtype.type
    for i, first, shape in places.given:
        out[i] = new(shape, dtype, start + first)
    if places.copied:
        for i, _, shape in places.given:
            if math.prod(shape) == 1:
                out[i] = out[i].copy()


def widened(laid: Laid) -> Any:
    """Return the message in the dtype in which it is combined; a copy if that is another dtype."""
    wire = laid.message.wire
    return laid.send if laid.send.dtype == wire else laid.send.astype(wire)


# --- routes ---------------------------------------------------------------------


class GpuCall(NamedTuple):
    """What a route is told of an all-reduce. The device is this rank's GPU, which is current."""

    topology: Topology
    device: int
    algorithm: str | None  # of the host, which the user named
    timeout_seconds: float | None
    half: bool = False  # whether NCCL adds half precision as it is


class Route(ABC):
    """One way to reduce messages on the ranks' GPUs. A user chooses it by its ``name``."""

    name: str

    def obstacle(self, topology: Topology, device: int) -> str:
        """Return why the ranks cannot use this route, or an empty text, the same on all. Collective, under the lock."""
        return ""

    def supports(self, wire: np.dtype, combine: np.ufunc) -> bool:
        """Return whether the route can combine values of this dtype."""
        return True

    def meets(self, topology: Topology, message: Message, algorithm: str | None) -> bool:
        """Return whether `reduce`, for this message, calls `CollectiveLock.meet` before any other communication."""
        return False

    @abstractmethod
    def reduce(self, call: GpuCall, jobs: Sequence[Laid]) -> None:
        """Write the reductions over all ranks, in the order of the current stream. The caller holds the lock."""


# --- the combination of the arrays of several ranks on one GPU ------------------


_TOGETHER = 8  # rows in one launch: a thread holds some elements of each

_sums: dict[int, EachElement] = {}


def combine_on_gpu(combine: np.ufunc, rows: Sequence[Any], total: Any) -> None:
    """Write ``rows[0] + rows[1] + ...`` to ``total``, in this order; sums take few launches that read each row once.

    Rows are contiguous, of the length and dtype of ``total``, which may be the first row.
    """
    if combine is not np.add:
        if total is not rows[0]:
            total[...] = rows[0]
        for row in rows[1:]:
            combine(total, row, out=total)
        return
    dtype = total.dtype
    if dtype.kind == "c":
        dtype = np.dtype(f"f{dtype.itemsize // 2}")
    elif dtype.kind == "i":
        dtype = np.dtype(f"u{dtype.itemsize}")  # the sum has the same bits
    bits, into = [row.view(dtype) for row in rows], total.view(dtype)
    _sum_of(min(len(rows), _TOGETHER))([[each] for each in (*bits[:_TOGETHER], into)])
    for first in range(_TOGETHER, len(rows), _TOGETHER - 1):
        more = bits[first : first + _TOGETHER - 1]
        _sum_of(1 + len(more))([[each] for each in (into, *more, into)])


def _sum_of(number: int) -> EachElement:
    found = _sums.get(number)
    if found is None:
        names = [f"a{i}" for i in range(number)]
        body = f"total = {' + '.join(names)};"
        found = _sums[number] = EachElement(f"mpistrat_sum_{number}", names, ["total"], [], body)
    return found


# --- NCCL, through CuPy, for ranks that each have their own GPU -----------------


_TYPES = {
    np.dtype(dtype): f"NCCL_{name}"
    for dtype, name in {
        np.int32: "INT32",
        np.uint32: "UINT32",
        np.int64: "INT64",
        np.uint64: "UINT64",
        np.float32: "FLOAT32",
        np.float64: "FLOAT64",
    }.items()
}
_HALVES = {"float16": "NCCL_FLOAT16", "bfloat16": "NCCL_BFLOAT16"}
_OPERATIONS: dict[Any, str] = {
    np.add: "NCCL_SUM",
    np.multiply: "NCCL_PROD",
    np.maximum: "NCCL_MAX",
    np.minimum: "NCCL_MIN",
}

# NcclError is a RuntimeError. CuPy raises a KeyError instead for a status that it does not know.
_ERRORS = (RuntimeError, KeyError)
_IN_PROGRESS = 7
_NOT_READY = 600  # cudaErrorNotReady


def nccl_for(what: str) -> Any:
    """Return the module ``cupy.cuda.nccl``, or raise RuntimeError whose text begins with ``what``."""
    cupy = cupy_for(what)
    gpu_count(what)
    if "cupy.cuda.nccl" not in sys.modules:  # catch_warnings is not for several threads, so only once
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns if it does not find NCCL
            try:
                importlib.import_module("cupy.cuda.nccl")
            except ImportError as error:
                raise RuntimeError(f"{what}: CuPy {cupy.__version__} has no NCCL: {error}") from error
    nccl = sys.modules["cupy.cuda.nccl"]
    if not getattr(nccl, "available", True):
        raise RuntimeError(
            f"{what}: CuPy {cupy.__version__} does not find NCCL (libnccl.so.2): pip install nvidia-nccl-cu12, or "
            "-cu13 with the CuPy for CUDA 13"
        )
    return nccl


class Communicators(dict[int, Any], Slot):
    """The communicators of NCCL, by GPU."""

    def close(self) -> None:
        """Destroy the communicators while CUDA still runs. Collective."""
        while self:
            self.popitem()[1].destroy()


class NcclRoute(Route):
    """The route by ``ncclAllReduce`` on the caller's stream, without waiting.

    Half precision is widened to float32, unless ``rc.nccl_half`` is set. Maxima and minima of floating point numbers
    use another route, since those of NCCL may ignore NaN.
    """

    name = "nccl"

    def obstacle(self, topology: Topology, device: int) -> str:
        nccl, problem, gpu = None, "", ""
        try:
            nccl = nccl_for("it")
            gpu = seen_gpus("NCCL")[device]
            # Make the CUDA context now: if that fails on one rank inside NCCL, the other ranks wait forever.
            with on_device(device):
                cupy_for("it").cuda.runtime.memGetInfo()
        except RuntimeError as error:
            problem = str(error)
        reports = topology.world.allgather((problem, gpu))
        for rank, (text, _) in enumerate(reports):
            if text:
                return f"rank {rank}: {text}"
        gpus = [(each, topology.place_of(rank)[0]) for rank, (_, each) in enumerate(reports)]
        for each in gpus:
            sharing = [rank for rank, other in enumerate(gpus) if other == each]
            if len(sharing) > 1:
                return f"{ranks_in_words(sharing)} share a GPU, and NCCL needs one for every rank"
        return self._connect(topology, device, nccl)

    def _connect(self, topology: Topology, device: int, nccl: Any) -> str:
        made: Any = None
        if topology.rank == 0:
            try:
                made = nccl.get_unique_id()
            except _ERRORS as error:  # for example without a network interface; other ranks wait for bcast
                made = f"NCCL does not start: {error}"
        made = topology.world.bcast(made)  # bytes; a tuple from CuPy before 14
        if isinstance(made, str):
            return f"rank 0: {made}"
        problem, communicator = "", None
        # Else the first use of an algorithm connects the ranks inside that call, before a limit begins. Nothing limits
        # the start itself: CuPy (14.2) has no start that returns at once. The watchdog reports a rank that hangs here.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        try:
            with on_device(device):
                communicator = nccl.NcclCommunicator(topology.size, made, topology.rank)
        except _ERRORS as error:
            problem = f"NCCL does not start: {error}"
        for rank, text in enumerate(topology.world.allgather(problem)):
            if text:
                return f"rank {rank}: {text}"
        topology.slot(Communicators)[device] = communicator
        return ""

    def supports(self, wire: np.dtype, combine: np.ufunc) -> bool:
        if wire.kind == "c":
            return combine is np.add and np.dtype(f"f{wire.itemsize // 2}") in _TYPES
        return wire in _TYPES and (combine in (np.add, np.multiply) or wire.kind in "iu")

    def reduce(self, call: GpuCall, jobs: Sequence[Laid]) -> None:
        cupy, nccl = cupy_for("NCCL"), sys.modules["cupy.cuda.nccl"]  # `obstacle` has imported it
        topology = call.topology
        communicator = topology.slot(Communicators)[call.device]
        _check(topology, communicator)  # errors of earlier operations
        stream = cupy.cuda.get_current_stream()
        for job in jobs:
            combine = job.message.combine
            half = _HALVES.get(job.send.dtype.name) if call.half and combine is np.add else None
            send = job.send if half else widened(job)
            wide = job.total if job.total.dtype == send.dtype else cupy.empty_like(send)
            reals, words = send.dtype, 1
            if reals.kind == "c":
                reals, words = np.dtype(f"f{reals.itemsize // 2}"), 2
            name, divisor = _OPERATIONS[combine], job.message.divisor
            # NCCL multiplies before it adds. By a power of two that is exact, but for results below 1e-38 in float32;
            # in float16 below 6e-5. And it saves a launch.
            if not half and reals.kind == "f" and divisor == topology.size > 1 and divisor & (divisor - 1) == 0:
                name, divisor = "NCCL_AVG", 1
            communicator.allReduce(
                int(send.data.ptr),
                int(wide.data.ptr),
                job.message.length * words,
                getattr(nccl, half or _TYPES[reals]),
                getattr(nccl, name),
                stream.ptr,
            )
            finish(wide.astype(job.message.wire) if half and divisor != 1 else wide, divisor, job.total)
        if call.timeout_seconds is not None:
            done = cupy.cuda.Event(disable_timing=True)
            done.record(stream)  # later work of other threads in this stream is not waited for
            _wait(topology, communicator, done, call.timeout_seconds)


def _wait(topology: Topology, communicator: Any, done: Any, seconds: float) -> None:
    """Wait for an event, and abort the communicator after ``seconds``: NCCL cannot be interrupted otherwise."""
    deadline, backoff, runtime = time.monotonic() + seconds, Backoff(), cupy_for("NCCL").cuda.runtime
    while status := runtime.eventQuery(done.ptr):  # CuPy's `done` is False for ever after an error of the GPU
        _check(topology, communicator, done.synchronize if status != _NOT_READY else None)
        if time.monotonic() > deadline:
            text = f"rank {topology.rank}: an all-reduce by NCCL was not done within {seconds:g} s"
            _abort(topology, communicator, "after a time-out", text)
            raise TimeoutError(f"{text}; fix: see what the GPUs and the network do, or allow more by timeout_seconds")
        backoff.pause()
    _check(topology, communicator)


def _check(topology: Topology, communicator: Any, ask: Callable[[], None] | None = None) -> None:
    """Raise an error that NCCL found since the last call, such as a broken link; or what ``ask`` raises, of CUDA."""
    try:
        (ask or communicator.check_async_error)()
    except _ERRORS as error:
        if error.args == (_IN_PROGRESS,):
            return
        what = "an all-reduce by NCCL" if ask is None else "CUDA, in work before or in an all-reduce by NCCL,"
        text = f"rank {topology.rank}: {what} failed: {error}"
        _abort(topology, communicator, "after an error of NCCL", text)
        raise RuntimeError(f"{text}; fix: see the output of the other ranks, or set NCCL_DEBUG=WARN") from error


def _abort(topology: Topology, communicator: Any, when: str, text: str) -> None:
    """Give up the topology, and end the operations of NCCL on this GPU."""
    topology.lock.give_up(when, text)
    communicator.abort()
