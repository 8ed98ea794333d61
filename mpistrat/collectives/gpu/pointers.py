"""Moves between the memories of GPUs by a CUDA-aware MPI library, which is given device pointers.

Each where it was found to work (`gpu_verdicts`), blocking, and never a reduction: libraries make these by a copy on the
host that is not pinned, or not at all. The library maps and registers what it is given, and lets go of none of it: so
it gets the same few pieces of memory for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpistrat.collectives.gpu import verdicts as gpu_verdicts
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.device import cupy_for
from mpistrat.runtime.environment import Options, rc
from mpistrat.runtime.process import mpi
from mpistrat.runtime.slot import Slot
from mpistrat.runtime.topology import Topology

PIECE_BYTES = 64 << 20

_ASK = operation("device pointers")
_idle: dict[int, list[Scratch]] = {}


class Scratch:
    """What the library is given.

    Attributes
    ----------
    send, receive : cupy.ndarray of uint8, shape (PIECE_BYTES,)
    left : cupy.cuda.Event
        Its last use, in whichever stream.
    """

    def __init__(self, cupy: Any):
        self.send = _allocate(cupy, PIECE_BYTES)
        self.receive = _allocate(cupy, PIECE_BYTES)
        self.left = cupy.cuda.Event(disable_timing=True)


def _allocate(cupy: Any, nbytes: int) -> Any:
    """Return bytes of the current GPU outside of CuPy's pool: an array that begins where its allocation does."""
    return cupy.ndarray((nbytes,), np.uint8, memptr=cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0))


@contextmanager
def scratch(device: int) -> Iterator[Scratch]:
    """The memory of one thread on the current GPU, once the stream that it was last used in has left it."""
    cupy = cupy_for("arrays on GPUs")
    waiting, stream = _idle.setdefault(device, []), cupy.cuda.get_current_stream()
    try:
        memory = waiting.pop()
    except IndexError:
        memory = Scratch(cupy)
    stream.wait_event(memory.left)
    try:
        yield memory
    finally:
        memory.left.record(stream)
        waiting.append(memory)


def all_to_all(topology: Topology, send: Any, receive: Any) -> None:
    """``MPI_Alltoall`` (MPI 4.1 section 6.8) of arrays on GPUs, of as many bytes for each rank."""
    topology.world.Alltoall(*_settled(send, receive))


def all_gather(topology: Topology, send: Any, receive: Any) -> None:
    """``MPI_Allgather`` (MPI 4.1 section 6.7) of arrays on GPUs."""
    topology.world.Allgather(*_settled(send, receive))


def all_gather_uneven(topology: Topology, send: Any, receive: Any, counts: Sequence[int]) -> None:
    """``MPI_Allgatherv`` (MPI 4.1 section 6.7) of arrays on GPUs, ``counts`` elements of each rank side by side."""
    (data, _), (into, byte) = _settled(send, receive)
    topology.world.Allgatherv(
        [data, byte], [into, [count * receive.itemsize for count in counts], None, byte]
    )


def broadcast(topology: Topology, data: Any, root: int) -> None:
    """``MPI_Bcast`` (MPI 4.1 section 6.4) of an array on a GPU."""
    topology.world.Bcast(*_settled(data), root)


def _settled(*arrays: Any) -> list[list[Any]]:
    """Arrays as MPI takes them, once they are free of what the stream still does to them."""
    MPI = mpi.start()
    cupy_for("arrays on GPUs").cuda.get_current_stream().synchronize()
    return [[MPI.buffer.fromaddress(int(each.data.ptr), each.nbytes), MPI.BYTE] for each in arrays]


class Refusals(dict[int, dict[str, str]], Slot):
    """For each GPU of this rank, why MPI is not given device pointers for an operation; empty if it is."""


def possible(topology: Topology, device: int, *operations: str) -> bool:
    """Whether the library may be given device pointers for these. Collective when asked for the first time.

    One rank alone needs none.
    """
    if topology.size == 1:
        return True
    if device not in topology.slot(Refusals):
        with topology.turn(_ASK):
            obstacles(topology, device)
    return not any(topology.slot(Refusals)[device][name] for name in operations)


def obstacles(topology: Topology, device: int) -> dict[str, str]:
    """Of each operation why the library is not given device pointers; empty if it is.

    Collective when asked for the first time, in a turn.
    """
    found = topology.slot(Refusals).get(device)
    if found is None:
        found = topology.slot(Refusals)[device] = _look(topology, device)
    return found


def _look(topology: Topology, device: int) -> dict[str, str]:
    problem, key, mode = "", None, ""
    try:
        mode = rc.gpu_direct
        key = gpu_verdicts.key(topology, device)
    except (RuntimeError, ValueError) as error:
        problem = str(error)
    told = topology.world.allgather((problem, mode, key))
    texts = [f"rank {rank}: {text}" for rank, (text, _, _) in enumerate(told) if text]
    if len({mode for _, mode, _ in told}) > 1:
        texts.append(f"{Options.gpu_direct.variable} differs between ranks: {[mode for _, mode, _ in told]}")
    if mode == "off":
        texts.append(f"{Options.gpu_direct.origin(rc)} is off")
    if mode == "auto" and any(other != key for _, _, other in told):
        texts.append("the ranks have GPUs, drivers or MPI libraries of several kinds")
    if texts or mode == "on":
        return dict.fromkeys(gpu_verdicts.OPERATIONS, texts[0] if texts else "")
    assert key is not None
    found = gpu_verdicts.obstacles(key) if topology.rank == 0 else {}
    return dict(topology.world.bcast(found))
