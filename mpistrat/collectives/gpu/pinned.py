"""The route through pinned memory, where the algorithms of the host combine piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.collectives.algorithms.choose import choose
from mpistrat.collectives.algorithms.contract import Algorithm
from mpistrat.collectives.division import divide
from mpistrat.collectives.gpu.packing import GpuBucket, PackedBucket
from mpistrat.collectives.gpu.route import Route
from mpistrat.runtime.device import Device
from mpistrat.runtime.gpu.pinned import CHUNK_BYTES, StagedCopy, staging, through_host
from mpistrat.runtime.topology import Topology


class PinnedRoute(Route):
    """The route through the host, which overlaps the copy to it, the combination, and the copy back.

    It works for several ranks on one GPU, any MPI library and any dtype. The result has the same bits as that of the
    same arrays on the host, reduced by the same algorithm.
    """

    name = "pinned"

    def meets(self, topology: Topology, bucket: GpuBucket, algorithm: str | None) -> bool:
        return _algorithm(topology, bucket, algorithm).meets

    def reduce(
        self,
        topology: Topology,
        device: int,
        jobs: Sequence[PackedBucket],
        algorithm: str | None,
        timeout_seconds: float | None,
    ) -> None:
        pieces: list[StagedCopy] = []
        for job in jobs:
            pieces += _pieces(topology, job, algorithm)
        with np.errstate(all="ignore"), staging(device) as stage:
            through_host(stage, pieces)


def _algorithm(topology: Topology, bucket: GpuBucket, name: str | None) -> Algorithm:
    return choose(topology, bucket.length * bucket.wire.itemsize, bucket.wire, Device("cpu"), name)


def _pieces(topology: Topology, job: PackedBucket, name: str | None) -> list[StagedCopy]:
    bucket = job.bucket
    algorithm = _algorithm(topology, bucket, name)
    widest = max(each.itemsize for each in (bucket.source, bucket.wire, bucket.result))
    step = max(1, min(algorithm.piece_bytes(topology), CHUNK_BYTES) // widest)
    source, target = int(job.message.data.ptr), int(job.total.data.ptr)

    def work(down: np.ndarray, up: np.ndarray) -> np.ndarray:
        send = down.view(bucket.source)
        if bucket.wire == bucket.source:
            wide = send
        else:
            wide = np.empty(len(send), bucket.wire)
        algorithm.reduce(topology, bucket.combine, send, wide)
        if bucket.divisor != 1 and wide.dtype.kind not in "iu":
            divide(wide, bucket.divisor, wide)
        if wide is send and bucket.result == bucket.source:
            return down
        total = up[: len(wide) * bucket.result.itemsize].view(bucket.result)
        if bucket.divisor != 1 and wide.dtype.kind in "iu":
            divide(wide, bucket.divisor, total)
        else:
            total[...] = wide
        return up[: total.nbytes]

    size, result = bucket.source.itemsize, bucket.result.itemsize
    return [
        StagedCopy(
            source + start * size, min(step, bucket.length - start) * size, work, target + start * result
        )
        for start in range(0, bucket.length, step)
    ]
