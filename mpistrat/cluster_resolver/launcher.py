"""What the launcher of MPI programs tells each rank: mpirun and mpiexec of all kinds, and jsrun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mpistrat.cluster_resolver.variables import first_of


class LauncherVariables(NamedTuple):
    """The variables of a launcher, for each fact in order of trust.

    Attributes
    ----------
    name : str
        What users call it.
    rank, size, local_rank, local_size, node : tuple of str
        Variables that hold numbers.
    host : tuple of str
        Variables that hold the name of the node.
    alone : bool
        Whether no scheduler's own launcher sets the same variables.
    """

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    alone: bool = False


class Launched(NamedTuple):
    """What a launcher told this rank. What it did not is None.

    Attributes
    ----------
    launcher : str
        What users call it.
    rank, size, local_rank, local_size, node : int or None
        This rank's number, that of all ranks, the same among those of its node, and the number of its node.
    host : str or None
        The name of its node.
    sources : mapping
        For each of these the variable.
    alone : bool
        Whether no scheduler's own launcher sets these variables.
    """

    launcher: str
    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None
    node: int | None
    host: str | None
    sources: Mapping[str, str]
    alone: bool = False


OPEN_MPI = LauncherVariables(
    "mpirun of Open MPI",
    rank=("OMPI_COMM_WORLD_RANK",),
    size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    host=("PMIX_HOSTNAME",),
    alone=True,
)
_MVAPICH = tuple(
    LauncherVariables(
        "mpirun_rsh of MVAPICH",
        rank=(f"{prefix}_COMM_WORLD_RANK",),
        size=(f"{prefix}_COMM_WORLD_SIZE",),
        local_rank=(f"{prefix}_COMM_WORLD_LOCAL_RANK",),
        local_size=(f"{prefix}_COMM_WORLD_LOCAL_SIZE",),
        alone=True,
    )
    for prefix in ("MV2", "MVP")
)
# PALS has no variable of its own for the number of ranks. srun --mpi=cray_shasta sets all of these, too.
_PALS = LauncherVariables(
    "mpiexec of Cray PALS",
    rank=("PALS_RANKID",),
    size=("PMI_SIZE",),
    local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
    local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    node=("PALS_NODEID",),
    host=("PMIX_HOSTNAME",),
)
_HYDRA = LauncherVariables(
    "mpiexec of MPICH, Intel MPI or the like",
    rank=("PMI_RANK",),
    size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    host=("PMI_HOSTNAME",),
)
_PMIX = LauncherVariables(
    "a launcher that speaks PMIx", rank=("PMIX_RANK",), size=(), host=("PMIX_HOSTNAME",)
)

JSRUN = LauncherVariables(
    "jsrun",
    rank=("JSM_NAMESPACE_RANK",),
    size=("JSM_NAMESPACE_SIZE",),
    local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
    local_size=("JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    host=("PMIX_HOSTNAME",),
)
FLUX = LauncherVariables(
    "flux run",
    rank=("FLUX_TASK_RANK",),
    size=("FLUX_JOB_SIZE",),
    local_rank=("FLUX_TASK_LOCAL_ID",),
    host=("PMIX_HOSTNAME",),
)

# Whoever sets the first of these knows the most about its ranks; the last ones are set by many.
_LAUNCHERS = (OPEN_MPI, *_MVAPICH, _PALS, _HYDRA, _PMIX)


def launched(environ: Mapping[str, str]) -> Launched | None:
    """What the launcher of an MPI program told this rank, None if none started it.

    Raises
    ------
    ValueError
        If a variable holds no number.

    Examples
    --------
    >>> launched({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}).local_rank
    1
    """
    return next(filter(None, (told(environ, each) for each in _LAUNCHERS)), None)


def told(environ: Mapping[str, str], launcher: LauncherVariables) -> Launched | None:
    """What this launcher told this rank, None if it did not start it."""
    rank, variable = first_of(environ, launcher.rank)
    if rank is None:
        return None
    sources = {"launcher": variable, "rank": variable}
    numbers: dict[str, int | None] = {}
    for fact in ("size", "local_rank", "local_size", "node"):
        numbers[fact], variable = first_of(environ, getattr(launcher, fact))
        sources[fact] = variable
    host = next((name for name in launcher.host if environ.get(name)), None)
    sources["host"] = host or ""
    return Launched(
        launcher.name,
        rank,
        host=environ[host] if host else None,
        sources=sources,
        alone=launcher.alone,
        **numbers,
    )
