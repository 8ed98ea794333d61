"""Which operations of an MPI library work on the memory of GPUs, as far as that was tried.

No library tells reliably, and a wrong yes ends the program: so each operation is tried once, by ``mpistrat check
--gpu-direct``, and what came out is kept for this MPI library, this driver, this GPU and this number of nodes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from mpistrat.runtime.device import cupy_for
from mpistrat.runtime.process import mpi
from mpistrat.runtime.topology import Topology

# Moves only: reductions and what is not blocking are never asked for.
OPERATIONS = ("Alltoall", "Allgather", "Allgatherv", "Bcast")
WORKS, TRYING = "works", "was tried, and did not come back"


def key(topology: Topology, device: int) -> list[Any]:
    """What a verdict holds for. The same on all ranks of a job on nodes of one kind."""
    runtime = cupy_for("GPUs").cuda.runtime
    library: str = mpi.start().Get_library_version()
    name = runtime.getDeviceProperties(device)["name"]
    return [
        library.split("\n")[0].rstrip("\0 "),
        runtime.driverGetVersion(),
        name.decode() if isinstance(name, bytes) else str(name),
        "several nodes" if len(topology.nodes) > 1 else "one node",
    ]


def path_of(key: list[Any]) -> Path:
    """Where verdicts are kept: in XDG_CACHE_HOME or ``~/.cache``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return cache / "mpistrat" / f"gpu-direct-{name}.json"


def read(key: list[Any]) -> dict[str, str]:
    """Of each operation that was tried, what came out; empty where none was."""
    try:
        content = json.loads(path_of(key).read_text())
        if content["for"] != key:
            return {}
        return {str(name): str(text) for name, text in content["operations"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write(key: list[Any], operations: dict[str, str]) -> None:
    """Keep what came out, whole or not at all."""
    path = path_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"for": key, "operations": operations}, indent=1) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def obstacles(key: list[Any]) -> dict[str, str]:
    """Of each operation why it is not used; empty if it works."""
    verdicts = read(key)
    return {operation: _obstacle(operation, verdicts.get(operation)) for operation in OPERATIONS}


def _obstacle(operation: str, verdict: str | None) -> str:
    if verdict is None:
        return f"{operation} on the memory of GPUs was not tried here: run mpistrat check --gpu-direct"
    if verdict != WORKS:
        return f"{operation} on the memory of GPUs {verdict} (mpistrat check --gpu-direct)"
    return ""
