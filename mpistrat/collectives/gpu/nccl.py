"""The route by NCCL, through CuPy, for ranks that each have their own GPU."""

from __future__ import annotations

import importlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays.device import cupy_for, gpu_count, on_device, seen_gpus
from mpistrat.collectives.gpu.route import GpuCall, PackedMessage, Route, widened
from mpistrat.collectives.operations import finish
from mpistrat.process.waiting import Backoff
from mpistrat.runtime.agreement.operation import ranks_in_words
from mpistrat.runtime.topology import Slot, Topology

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
_IN_PROGRESS = 7  # ncclInProgress
_NOT_READY = 600  # cudaErrorNotReady


def nccl_for(subject: str) -> Any:
    """Return the module ``cupy.cuda.nccl``, or raise RuntimeError whose text begins with ``subject``."""
    cupy = cupy_for(subject)
    gpu_count(subject)
    if "cupy.cuda.nccl" not in sys.modules:  # catch_warnings is not for several threads, so only once
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns if it does not find NCCL
            try:
                importlib.import_module("cupy.cuda.nccl")
            except ImportError as error:
                raise RuntimeError(f"{subject}: CuPy {cupy.__version__} has no NCCL: {error}") from error
    nccl = sys.modules["cupy.cuda.nccl"]
    if not getattr(nccl, "available", True):
        raise RuntimeError(
            f"{subject}: CuPy {cupy.__version__} does not find NCCL (libnccl.so.2): pip install nvidia-nccl-cu12, or "
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
    use another route, since NCCL's may ignore NaN.
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
        gpus = [(device_id, topology.place_of(rank)[0]) for rank, (_, device_id) in enumerate(reports)]
        for candidate in gpus:
            sharing = [rank for rank, other in enumerate(gpus) if other == candidate]
            if len(sharing) > 1:
                return f"{ranks_in_words(sharing)} share a GPU, and NCCL needs one for every rank"
        return self._connect(topology, device, nccl)

    def _connect(self, topology: Topology, device: int, nccl: Any) -> str:
        unique_id: Any = None
        if topology.rank == 0:
            try:
                unique_id = nccl.get_unique_id()
            except _ERRORS as error:  # for example without a network interface; other ranks wait for bcast
                unique_id = f"NCCL does not start: {error}"
        unique_id = topology.world.bcast(unique_id)  # bytes; a tuple from CuPy before 14
        if isinstance(unique_id, str):
            return f"rank 0: {unique_id}"
        problem, communicator = "", None
        # Else the first use of an algorithm connects the ranks inside that call, before a limit begins. Nothing limits
        # the start itself: CuPy (14.2) has no start that returns at once. The watchdog reports a rank that hangs here.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        try:
            with on_device(device):
                communicator = nccl.NcclCommunicator(topology.size, unique_id, topology.rank)
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

    def reduce(self, call: GpuCall, jobs: Sequence[PackedMessage]) -> None:
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
        subject = "an all-reduce by NCCL" if ask is None else "CUDA, in work before or in an all-reduce by NCCL,"
        text = f"rank {topology.rank}: {subject} failed: {error}"
        _abort(topology, communicator, "after an error of NCCL", text)
        raise RuntimeError(f"{text}; fix: see the output of the other ranks, or set NCCL_DEBUG=WARN") from error


def _abort(topology: Topology, communicator: Any, when: str, text: str) -> None:
    """Give up the topology, and end the operations of NCCL on this GPU."""
    topology.lock.give_up(when, text)
    communicator.abort()
