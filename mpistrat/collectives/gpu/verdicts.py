"""The verdicts: which operations of an MPI library were found to work on the memory of GPUs.

Libraries do not tell this reliably, and a wrong yes ends the program. So ``mpistrat check --gpu-direct`` tries each
operation once. The result is kept for this MPI library and its options, the driver and the GPU, and for one node or
several.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mpistrat.arrays.device import cupy_for
from mpistrat.process import files, mpi
from mpistrat.runtime.topology import Topology

# Blocking moves only: reductions and non-blocking operations are never used.
OPERATIONS = ("Alltoall", "Allgather", "Allgatherv", "Bcast")
WORKS, TRYING = "works", "was tried, and did not come back"
PIECE_BYTES = 64 << 20  # of the largest message. A library may take another path for it than for a small one
# What turns the support of a library for GPUs on and off, or chooses its paths. Launchers set some of OMPI_MCA_*.
_OPTIONS = re.compile(
    r"MPICH_GPU_|MPIR_CVAR_|I_MPI_OFFLOAD|MV2_USE_|PSM2_CUDA|FI_(HMEM|PROVIDER)|UCX_(?!NET_DEVICES|LOG)"
    r"|OMPI_MCA_(accelerator|btl|coll|mpi_cuda|mtl|opal_cuda|osc|pml|smsc)(_|$)"
)


def key(topology: Topology, device: int) -> list[Any]:
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


def path_of(key: list[Any]) -> Path:
    return files.cache_path("gpu-direct", key)


def read(key: list[Any]) -> dict[str, str]:
    """Return the verdict of each operation that was tried; empty if the file is missing or for another key."""
    try:
        content = json.loads(path_of(key).read_text())
        if content["for"] != key:
            return {}
        return {str(name): str(text) for name, text in content["operations"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write(key: list[Any], operations: dict[str, str]) -> None:
    text = json.dumps({"for": key, "operations": operations}, indent=1) + "\n"
    files.replace_text(path_of(key), text)


def obstacles(key: list[Any]) -> dict[str, str]:
    """Return why each operation is not used; empty if it works."""
    verdicts = read(key)
    return {operation: _obstacle(operation, verdicts.get(operation)) for operation in OPERATIONS}


def _obstacle(operation: str, verdict: str | None) -> str:
    if verdict is None:
        return f"{operation} on the memory of GPUs was not tried here: run mpistrat check --gpu-direct"
    if verdict != WORKS:
        return f"{operation} on the memory of GPUs {verdict} (mpistrat check --gpu-direct)"
    return ""
