"""From GPU to GPU of a node, or within one that ranks share, by what CUDA has for several processes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.collectives.gpu_combine import combine_on_gpu
from mpistrat.collectives.gpu_packing import Job, finish, widened
from mpistrat.collectives.gpu_route import Route, tried
from mpistrat.collectives.mpi_all_reduce import mpi_operation
from mpistrat.runtime import device_memory, mpi
from mpistrat.runtime.device import cupy_for
from mpistrat.runtime.device_memory import Windows
from mpistrat.runtime.kernels import copy_each
from mpistrat.runtime.pinned import CHUNK_BYTES, Piece, staging, through_host
from mpistrat.runtime.topology import Topology

WINDOW_BYTES = 32 << 20  # a piece: large enough that its two meetings cost little beside it


class IpcRoute(Route):
    """Each rank lays a piece down in memory that the others' GPUs see, adds up its slice of all, and fetches the rest.

    Several ranks may share a GPU. Between nodes, each slice goes through pinned memory on its rail.
    """

    name = "ipc"

    def obstacle(self, topology: Topology, device: int) -> str:
        if len(set(topology.ranks_per_node)) > 1:
            return "the nodes have different numbers of ranks"
        if topology.node.size == 1:
            return "every rank is alone on its node"
        problem, windows = open_windows(topology, device, 2 * WINDOW_BYTES)
        if windows is not None:
            topology.gpu_windows[device] = windows
        return problem

    def supports(self, wire: np.dtype, combine: np.ufunc) -> bool:
        return wire.kind in "iufc"

    def reduce(
        self,
        topology: Topology,
        device: int,
        jobs: Sequence[Job],
        algorithm: str | None,
        timeout_seconds: float | None,
    ) -> None:
        cupy = cupy_for("arrays on GPUs")
        windows = topology.gpu_windows[device]
        stream = cupy.cuda.get_current_stream()
        stream.wait_event(windows.left)  # it may have been another stream
        try:
            for job in jobs:
                message = widened(job)
                wide = job.total if job.total.dtype == message.dtype else cupy.empty_like(message)
                step = WINDOW_BYTES // message.itemsize
                for start in range(0, len(message), step):
                    part = slice(start, start + step)
                    _reduce_piece(topology, device, windows, job.bucket.combine, message[part], wide[part])
                finish(job, wide)
        finally:
            windows.left.record(stream)


def _reduce_piece(
    topology: Topology, device: int, windows: Windows, combine: np.ufunc, message: Any, total: Any
) -> None:
    """Whoever has met the others may write to its first half again; its second is read until they meet next."""
    node, dtype, length = topology.node, message.dtype, len(message)
    sends = [row[: message.nbytes].view(dtype) for row in windows.rows]
    results = [row[WINDOW_BYTES : WINDOW_BYTES + message.nbytes].view(dtype) for row in windows.rows]
    ends = [length * rank // node.size for rank in range(node.size + 1)]
    slices = [slice(ends[rank], ends[rank + 1]) for rank in range(node.size)]
    own = slices[node.rank]
    sends[node.rank][...] = message
    _meet(node)
    combine_on_gpu(combine, [row[own] for row in sends], results[node.rank][own])
    if len(topology.nodes) > 1:
        _on_rail(topology, device, combine, results[node.rank][own])
    _meet(node)
    copy_each(
        [row[part] for row, part in zip(results, slices, strict=True)], [total[part] for part in slices]
    )


def _meet(node: Any) -> None:
    """Wait for this GPU, then for the other ranks of the node: what they wrote may be read."""
    cupy_for("arrays on GPUs").cuda.get_current_stream().synchronize()
    node.Barrier()


def _on_rail(topology: Topology, device: int, combine: np.ufunc, own: Any) -> None:
    """Combine this rank's slice with those of the same local rank on the other nodes."""
    MPI = mpi.start()
    operation = mpi_operation(combine, own.dtype)

    def work(down: np.ndarray, up: np.ndarray) -> np.ndarray:
        topology.rail.Allreduce(MPI.IN_PLACE, down.view(own.dtype), operation)
        return down

    address = int(own.data.ptr)
    pieces = [
        Piece(address + start, min(CHUNK_BYTES, own.nbytes - start), work, address + start)
        for start in range(0, own.nbytes, CHUNK_BYTES)
    ]
    with staging(device) as stage:
        through_host(stage, pieces)


def open_windows(topology: Topology, device: int, nbytes: int) -> tuple[str, Windows | None]:
    """New memory of every rank that all ranks of its node see; or why there is none. Collective, in a turn."""
    windows: list[Windows] = []
    handles: list[bytes] = []

    def make() -> bytes:
        with cupy_for("it").cuda.Device(device):
            windows.append(Windows(device, device_memory.allocate(nbytes)))
            return windows[0].handle()

    def open_all() -> None:
        with cupy_for("it").cuda.Device(device):
            windows[0].open(handles, topology.node.rank)

    problem, handle = tried(topology, "memory that other processes open", make)
    if not problem:
        handles += topology.node.allgather(handle)
        problem, _ = tried(topology, "the memory of another rank's GPU", open_all)
    if not problem:
        problem = _wrong(topology, device, windows[0])
    if not problem:
        return "", windows[0]
    for each in windows:
        each.close()
    topology.world.Barrier()  # before one frees what another has open
    return problem, None


def _wrong(topology: Topology, device: int, windows: Windows) -> str:
    """What is wrong with the memory that was opened: a driver may open it, and show something else."""
    node = topology.node

    def look() -> None:
        for rank, row in enumerate(windows.rows):
            found = row[:8].get().view(np.int64)[0]
            if found != first + rank:
                raise RuntimeError(f"shows {found} instead of {first + rank}")

    first = int(node.bcast(secrets.randbits(62)))
    cupy = cupy_for("it")
    with cupy.cuda.Device(device):
        windows.rows[node.rank][:8].view(np.int64)[...] = first + node.rank
        _meet(node)
        problem, _ = tried(topology, "the memory of another rank's GPU", look)
    return problem
