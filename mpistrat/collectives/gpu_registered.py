"""Through the memory that the ranks of a node share, which GPUs copy to and from without another copy on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpistrat.collectives.combine_rows import combine_rows
from mpistrat.collectives.division import divide
from mpistrat.collectives.gpu_packing import Bucket, Job
from mpistrat.collectives.gpu_route import Route, tried
from mpistrat.collectives.mpi_all_reduce import mpi_operation
from mpistrat.runtime import mpi
from mpistrat.runtime.registered_memory import SLOTS, RegisteredMemory
from mpistrat.runtime.shared_memory import share
from mpistrat.runtime.topology import Topology

SLOT_BYTES = 2 << 20  # with 8 ranks 54 MiB: less than the 64 that containers have by default


class Piece(NamedTuple):
    """Elements of a bucket that go through one slot.

    Attributes
    ----------
    bucket : Bucket
    length : int
        Elements.
    source, target : int
        Where they, and their combination, lie on the GPU.
    """

    bucket: Bucket
    length: int
    source: int
    target: int


class RegisteredRoute(Route):
    """Each rank's GPU writes a piece where all see it, each rank combines its slice of all, all GPUs read the result.

    On the host a value is read once to be added up, and nothing is copied. While a piece is combined the next two are
    on their way down and the one before goes up. Between nodes, each slice is combined on its rail.
    """

    name = "registered"

    def obstacle(self, topology: Topology, device: int) -> str:
        if len(set(topology.ranks_per_node)) > 1:
            return "the nodes have different numbers of ranks"
        if topology.node.size == 1:
            return "every rank is alone on its node"
        problem, shared = tried(
            topology,
            "memory that ranks share",
            lambda: share(topology.node, SLOTS * SLOT_BYTES, SLOTS * SLOT_BYTES),
        )
        if problem:
            return problem
        problem, memory = tried(
            topology,
            "memory that ranks share and CUDA is told of",
            lambda: RegisteredMemory(device, shared, SLOT_BYTES),
        )
        if not problem:
            topology.gpu_registered[device] = memory
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
        memory = topology.gpu_registered[device]
        pieces = [piece for job in jobs for piece in _pieces(job, memory.results.shape[1])]
        try:
            memory.begin()
            with np.errstate(all="ignore"):
                _go(topology, memory, pieces)
            memory.end()
        except BaseException:
            memory.settle()
            raise


def _pieces(job: Job, room: int) -> list[Piece]:
    bucket = job.bucket
    source, result = bucket.source.itemsize, bucket.result.itemsize
    step = room // max(source, result)
    down, up = int(job.message.data.ptr), int(job.total.data.ptr)
    return [
        Piece(bucket, min(step, bucket.length - start), down + start * source, up + start * result)
        for start in range(0, bucket.length, step)
    ]


def _go(topology: Topology, memory: RegisteredMemory, pieces: Sequence[Piece]) -> None:
    """One barrier a piece: all slots of this one are full, all slices of the one before are combined.

    So after it the slot of the one before is free. Before it this rank sees to it that its GPU has read the result that
    the others are about to overwrite.
    """
    own = memory.slots[topology.node.rank]

    def fetch(i: int) -> None:
        if i < len(pieces):
            nbytes = pieces[i].length * pieces[i].bucket.source.itemsize
            memory.fetch(own[i % SLOTS], i % SLOTS, pieces[i].source, nbytes)

    for i in range(SLOTS - 1):
        fetch(i)
    for i in range(len(pieces) + 1):
        if i < len(pieces):
            memory.arrived[i % SLOTS].synchronize()
            memory.left[i % SLOTS].synchronize()
        topology.node.Barrier()
        fetch(i + SLOTS - 1)
        if i:
            before = pieces[i - 1]
            nbytes = before.length * before.bucket.result.itemsize
            memory.send((i - 1) % SLOTS, nbytes, before.target)
        if i < len(pieces):
            _combine(topology, memory, i % SLOTS, pieces[i])


def _combine(topology: Topology, memory: RegisteredMemory, number: int, piece: Piece) -> None:
    """This rank's slice of a piece: in the order of ranks in the node, then over the nodes."""
    bucket, rank, size = piece.bucket, topology.node.rank, topology.node.size
    part = slice(piece.length * rank // size, piece.length * (rank + 1) // size)
    if part.start == part.stop:
        return
    rows = [_elements(slot, bucket.source, piece.length)[part] for slot in memory.slots[:, number]]
    total = _elements(memory.results[number], bucket.result, piece.length)[part]
    wide = total if bucket.result == bucket.wire else np.empty(len(total), bucket.wire)
    combine_rows(bucket.combine, rows, wide)
    if len(topology.nodes) > 1:
        topology.rail.Allreduce(mpi.start().IN_PLACE, wide, mpi_operation(bucket.combine, bucket.wire))
    if bucket.divisor != 1 and wide.dtype.kind in "iu":
        divide(wide, bucket.divisor, total)
        return
    if bucket.divisor != 1:
        divide(wide, bucket.divisor, wide)
    if wide is not total:
        total[...] = wide


def _elements(memory: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
    return memory[: count * dtype.itemsize].view(dtype)
