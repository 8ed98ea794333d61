"""The route through pinned memory, where the algorithms of the host combine piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.collectives.algorithms.choose import Candidate, Choice
from mpistrat.collectives.gpu.packing import Laid
from mpistrat.collectives.gpu.route import GpuCall, Route
from mpistrat.collectives.on_host import reduce_piece
from mpistrat.collectives.packing import Message
from mpistrat.runtime.gpu.pinned import CHUNK_BYTES, StagedCopy, staging, through_host
from mpistrat.runtime.topology import Topology


class PinnedRoute(Route):
    """The route through the host, which overlaps the copy to it, the combination, and the copy back.

    It works for several ranks on one GPU, any MPI library and any dtype. The result has the same bits as that of the
    same arrays on the host, reduced by the same algorithm.
    """

    name = "pinned"

    def meets(self, topology: Topology, message: Message, algorithm: str | None) -> bool:
        return _best(topology, message, algorithm).algorithm.meets

    def reduce(self, call: GpuCall, jobs: Sequence[Laid]) -> None:
        pieces: list[StagedCopy] = []
        for job in jobs:
            pieces += _pieces(call.topology, job, call.algorithm)
        with staging(call.device) as stage:
            through_host(stage, pieces)


def _best(topology: Topology, message: Message, name: str | None) -> Candidate:
    return Choice.of(topology).best(message.length * message.wire.itemsize, message.wire, name)


def _pieces(topology: Topology, job: Laid, name: str | None) -> list[StagedCopy]:
    message = job.message
    algorithm, _, piece_bytes = _best(topology, message, name)
    source, result = message.source, message.result
    widest = max(each.itemsize for each in (source, message.wire, result))
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
