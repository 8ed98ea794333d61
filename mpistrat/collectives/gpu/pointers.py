"""Moves between the memories of GPUs by a CUDA-aware MPI library, which takes device pointers.

Only blocking operations that were found to work are used, and never a reduction. Libraries reduce through pageable
memory of the host, or not at all. The library maps and registers the memory that it gets and never releases it, so it
always gets the same few buffers.

A library does not tell reliably what works, and a wrong yes ends the program. So ``mpistrat check --gpu-direct`` tries
each operation once. The *verdict* is kept for this MPI library and its options, the driver and the GPU, and for one
node or several.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.arrays.device import cupy_for, lent
from mpistrat.process import files, mpi
from mpistrat.runtime.agreement.operation import operation
from mpistrat.runtime.environment import GPU_VERDICTS, RuntimeOptions, rc, site_file
from mpistrat.runtime.topology import Slot, Topology

# Blocking moves only: reductions and non-blocking operations are never used.
OPERATIONS = ("Alltoall", "Allgather", "Allgatherv", "Bcast")
WORKS, TRYING = "works", "was tried, and did not come back"
PIECE_BYTES = 64 << 20  # of the largest message. A library may take another path for it than for a small one
# What turns the support of a library for GPUs on and off, or chooses its paths. Launchers set some of OMPI_MCA_*.
_OPTIONS = re.compile(
    r"MPICH_GPU_|MPIR_CVAR_|I_MPI_OFFLOAD|MV2_USE_|PSM2_CUDA|FI_(HMEM|PROVIDER)|UCX_(?!NET_DEVICES|LOG)"
    r"|OMPI_MCA_(accelerator|btl|coll|mpi_cuda|mtl|opal_cuda|osc|pml|smsc)(_|$)"
)


def key_of(topology: Topology, device: int) -> list[Any]:
    """Return the conditions of a verdict, the same on all ranks of a job on nodes of one kind."""
    runtime = cupy_for("GPUs").cuda.runtime
    library: str = mpi.start().Get_library_version()
    name, file = runtime.getDeviceProperties(device)["name"], mpi.loaded_library()
    return [
        library.split("\n")[0].rstrip("\0 "),
        runtime.driverGetVersion(),
        name.decode() if isinstance(name, bytes) else str(name),
        "several nodes" if len(topology.nodes) > 1 else "one node",
        file,
        os.path.getsize(file) if os.path.exists(file) else 0,
        PIECE_BYTES,
        *(f"{name}={value}" for name, value in sorted(os.environ.items()) if _OPTIONS.match(name)),
    ]


def path_of_verdicts(key: list[Any]) -> Path:
    return files.cache_path("gpu-direct", key)


def read_verdicts(key: list[Any]) -> dict[str, str]:
    """Return the verdict of each operation that was tried, by this user or else by the site; empty if by neither."""
    contents = list(site_file().get(GPU_VERDICTS, ()))
    with suppress(OSError, ValueError):
        contents.insert(0, json.loads(path_of_verdicts(key).read_text()))
    for content in contents:
        with suppress(KeyError, TypeError, AttributeError):
            if content["for"] == key:
                return {str(name): str(text) for name, text in content["operations"].items()}
    return {}


def write_verdicts(key: list[Any], operations: dict[str, str]) -> None:
    text = json.dumps({"for": key, "operations": operations}, indent=1) + "\n"
    files.replace_text(path_of_verdicts(key), text)


def obstacles_by_verdict(key: list[Any]) -> dict[str, str]:
    """Return why each operation is not used; empty if it works."""
    verdicts = read_verdicts(key)
    return {operation: _obstacle(operation, verdicts.get(operation)) for operation in OPERATIONS}


def _obstacle(operation: str, verdict: str | None) -> str:
    if verdict is None:
        return f"{operation} on the memory of GPUs was not tried here: run mpistrat check --gpu-direct"
    if verdict != WORKS:
        return f"{operation} on the memory of GPUs {verdict} (mpistrat check --gpu-direct)"
    return ""


# --- device pointers ------------------------------------------------------------


_ASK = operation("device pointers")
_idle: dict[int, list[Scratch]] = {}


class Scratch:
    """The staging buffers on a GPU that MPI gets, of ``PIECE_BYTES`` each.

    ``released`` is the CUDA event after which they may be reused.
    """

    def __init__(self, cupy: Any):
        self.send = _allocate(cupy, PIECE_BYTES)
        self.receive = _allocate(cupy, PIECE_BYTES)
        self.released = cupy.cuda.Event(disable_timing=True)


def _allocate(cupy: Any, nbytes: int) -> Any:
    """Allocate bytes on the current GPU outside of CuPy's pool, so that the array begins with its allocation."""
    return cupy.ndarray((nbytes,), np.uint8, memptr=cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0))


@contextmanager
def scratch(device: int) -> Iterator[Scratch]:
    """Provide staging buffers of the current GPU to one thread, after the stream of their last use has ended."""
    cupy = cupy_for("arrays on GPUs")
    stream = cupy.cuda.get_current_stream()
    with lent(_idle, device, lambda _: Scratch(cupy)) as memory:
        stream.wait_event(memory.released)
        try:
            yield memory
        finally:
            memory.released.record(stream)


def all_to_all(topology: Topology, send: Any, receive: Any) -> None:
    """Exchange equal parts of arrays on GPUs by ``MPI_Alltoall`` (MPI 4.1 section 6.8)."""
    topology.world.Alltoall(*_settled(send, receive))


def all_gather(topology: Topology, send: Any, receive: Any) -> None:
    """Gather arrays on GPUs by ``MPI_Allgather`` (MPI 4.1 section 6.7)."""
    topology.world.Allgather(*_settled(send, receive))


def all_gather_uneven(topology: Topology, send: Any, receive: Any, counts: Sequence[int]) -> None:
    """Gather ``counts[rank]`` elements of each rank on GPUs by ``MPI_Allgatherv`` (MPI 4.1 section 6.7)."""
    (data, _), (into, byte) = _settled(send, receive)
    topology.world.Allgatherv([data, byte], [into, [count * receive.itemsize for count in counts], None, byte])


def broadcast(topology: Topology, data: Any, root: int) -> None:
    """Broadcast an array on a GPU by ``MPI_Bcast`` (MPI 4.1 section 6.4)."""
    topology.world.Bcast(*_settled(data), root)


def _settled(*arrays: Any) -> list[list[Any]]:
    """Return arrays as buffers of MPI, after the current stream has finished with them."""
    MPI = mpi.start()
    cupy_for("arrays on GPUs").cuda.get_current_stream().synchronize()
    return [[MPI.buffer.fromaddress(int(array.data.ptr), array.nbytes), MPI.BYTE] for array in arrays]


class Refusals(dict[int, dict[str, str]], Slot):
    """The reason why MPI does not get device pointers, by GPU and operation; empty if it does."""


def possible(topology: Topology, device: int, *operations: str) -> bool:
    """Return whether MPI takes device pointers for these operations. The first call of several ranks is collective."""
    if topology.size == 1:
        return True
    if device not in topology.slot(Refusals):
        with topology.lock.collective(_ASK):
            obstacles(topology, device)
    return not any(topology.slot(Refusals)[device][name] for name in operations)


def obstacles(topology: Topology, device: int) -> dict[str, str]:
    """Return why each operation does not get device pointers; empty if it does. Collective at first, under the lock."""
    reasons = topology.slot(Refusals).get(device)
    if reasons is None:
        reasons = topology.slot(Refusals)[device] = _find_obstacles(topology, device)
    return reasons


def _find_obstacles(topology: Topology, device: int) -> dict[str, str]:
    problem, key, mode = "", None, ""
    try:
        mode = rc.gpu_direct
        key = key_of(topology, device)
    except (RuntimeError, ValueError) as error:
        problem = str(error)
    reports = topology.world.allgather((problem, mode, key))
    texts = [f"rank {rank}: {text}" for rank, (text, _, _) in enumerate(reports) if text]
    if len({mode for _, mode, _ in reports}) > 1:
        texts.append(f"{RuntimeOptions.gpu_direct.variable} differs between ranks: {[mode for _, mode, _ in reports]}")
    if mode == "off":
        texts.append(f"{RuntimeOptions.gpu_direct.origin(rc)} is off")
    if mode == "auto" and any(other != key for _, _, other in reports):
        texts.append("the ranks have GPUs, drivers or MPI libraries of several kinds")
    if texts or mode == "on":
        return dict.fromkeys(OPERATIONS, texts[0] if texts else "")
    assert key is not None
    reasons = obstacles_by_verdict(key) if topology.rank == 0 else {}
    return dict(topology.world.bcast(reasons))
