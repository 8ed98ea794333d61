"""What the launcher of this process said: how many tasks it started, and which variables are its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mpistrat.runtime.process.launchers import (
    FLUX,
    HYDRA,
    JSRUN,
    LAUNCHERS,
    MPIRUN,
    MVAPICH,
    OPEN_MPI,
    PALS,
    SRUN,
)


class AloneError(RuntimeError):
    """Every task of a job is a job of its own, as the MPI library does not understand the launcher.

    Attributes
    ----------
    found : str
        What is wrong.
    remedy : str
        What to do.
    """

    def __init__(self, found: str, remedy: str):
        super().__init__(f"{found}. {remedy}")
        self.found, self.remedy = found, remedy


class Started(NamedTuple):
    """How many tasks a launcher says it started, and the variable that says so."""

    tasks: int
    variable: str


# The innermost launcher first: mpirun runs inside a step of a scheduler, not the other way round. Counts per node
# (MPI_LOCALNRANKS, PALS_LOCAL_SIZE) come with PMI_SIZE.
_COUNTS = {each.size[0]: each.name for each in (OPEN_MPI, *MVAPICH, HYDRA, JSRUN, FLUX, SRUN)}
_OWN = {
    **dict.fromkeys(("openmpi", "spectrum"), (OPEN_MPI,)),
    **dict.fromkeys(("mpich", "intel", "cray"), (HYDRA,)),
    "mvapich": (HYDRA, *MVAPICH),
}

_SRUN_PLUGIN = {
    "openmpi": "pmix",
    "mpich": "pmi2",
    "mvapich": "pmi2",
    "intel": "pmi2",
    "cray": "cray_shasta",
}

# Derivatives call themselves by the name of what they derive from, too.
_LIBRARIES = (
    ("cray mpich", "cray"),
    ("intel(r) mpi", "intel"),
    ("mvapich", "mvapich"),
    ("spectrum mpi", "spectrum"),
    ("open mpi", "openmpi"),
    ("mpich", "mpich"),
)

# PALS hands ranks a PMI_RANK, too, and so does srun with PALS_RANKID.
_OF_MPIRUN = ("HYDI_CONTROL_FD", *(name for each in MPIRUN if each is not PALS for name in each.rank))
_PREFIXES = (
    *("OMPI_", "OPAL_", "PMIX_", "PRTE_"),
    *("PMI_", "HYDI_", *HYDRA.local_rank, *HYDRA.local_size, "MV2_COMM_WORLD_", "MVP_COMM_WORLD_"),
)
_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")
_NO_SETTINGS = (
    *("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs"),
    *(
        "OMPI_MCA_ess",
        "OMPI_MCA_orte_",
        "OMPI_MCA_pmix",
        "OMPI_MCA_shmem_RUNTIME",
        "OMPI_MCA_mpi_oversubscribe",
    ),
)


def started_tasks(environ: Mapping[str, str]) -> Started | None:
    """How many tasks the launcher of this process says it started, None if no launcher says anything."""
    for variable in _COUNTS:
        count = _count(environ, variable)
        if count is not None and not (variable in SRUN.size and _is_left_over(environ)):
            return Started(count, variable)
    return None


def _is_left_over(environ: Mapping[str, str]) -> bool:
    from mpistrat.runtime.process.left_over_step import left_over  # 0.6 ms that only a step of Slurm needs

    try:
        return left_over(environ) is not None
    except ValueError:  # for those to report that need what stands there
        return False


def library_family(library: str) -> str:
    """Which MPI a library is, from the string of ``MPI.Get_library_version()``.

    One of ``"openmpi"``, ``"mpich"``, ``"intel"``, ``"cray"``, ``"mvapich"``, ``"spectrum"`` and ``"other"``.

    Examples
    --------
    >>> library_family("Open MPI v5.0.11, package: Open MPI user@localhost Distribution")
    'openmpi'
    >>> library_family("MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)")
    'cray'
    """
    lowered = library.lower()
    return next((family for text, family in _LIBRARIES if text in lowered), "other")


def check_singleton(size: int, library: str, environ: Mapping[str, str]) -> None:
    """Find the job whose every task believes to be the whole job.

    Parameters
    ----------
    size : int
        The size of ``MPI.COMM_WORLD``.
    library : str
        What ``MPI.Get_library_version()`` returns.
    environ : mapping
        The environment of this process.

    Raises
    ------
    AloneError
        If the size is 1 although the launcher started several tasks.
    """
    if size != 1:
        return
    family = library_family(library)
    if any(_count(environ, each.size[0]) == 1 for each in _OWN.get(family, ())):
        return  # started alone by the library's own launcher, inside a job of another one
    started = started_tasks(environ)
    if started is None or started.tasks == 1:
        return
    name = library.rstrip("\0").strip().partition("\n")[0].partition(",")[0]
    name = " ".join(name.split())
    raise AloneError(
        f"every task of this job is rank 0 of 1: the launcher started {started.tasks} tasks "
        f"({started.variable}={environ[started.variable]}, set by {_COUNTS[started.variable]}), but the MPI "
        f"library that is loaded ({name}) does not understand that launcher",
        f"{_remedy(started, family, environ)} A program that is meant to be alone inside such a job is "
        f"started with `env -u {started.variable}`.",
    )


def srun_plugin(family: str) -> str | None:
    """What ``srun --mpi=`` has to be for a library of this family, None if that is not known."""
    return _SRUN_PLUGIN.get(family)


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for starting another MPI job: without what the launcher of this process put there.

    What a user may have set (``OMPI_MCA_*`` and the like) stays. Outside of a job nothing is removed.
    """
    if not any(variable in environ for variable in _OF_MPIRUN):
        return dict(environ)
    return {name: value for name, value in environ.items() if not _is_launchers(name)}


def launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that tell how many tasks there are and which one this is."""
    ranks = (name for each in LAUNCHERS for name in each.rank)
    also = ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", *PALS.launch, "LSB_JOBID")
    return {name: environ[name] for name in (*_COUNTS, *ranks, *also) if name in environ}


def _count(environ: Mapping[str, str], variable: str) -> int | None:
    value = environ.get(variable, "")
    return int(value) if value.isdecimal() and int(value) > 0 else None


def _is_launchers(name: str) -> bool:
    if name.startswith(_SETTINGS):
        return name.startswith(_NO_SETTINGS)
    return name.startswith(_PREFIXES)


def _remedy(started: Started, family: str, environ: Mapping[str, str]) -> str:
    """What to do, as a sentence."""
    by = started.variable
    if by in HYDRA.size:  # srun and flux run speak PMI, too
        also = (*FLUX.size, *SRUN.size)
        by = next((name for name in also if _count(environ, name) == started.tasks), by)
    if by in SRUN.size:
        if family not in _SRUN_PLUGIN:
            return "Start it with `srun --mpi=...`; `srun --mpi=list` shows what this cluster has."
        library = " and I_MPI_PMI_LIBRARY set to the path of libpmi2.so" if family == "intel" else ""
        return (
            f"Start it with `srun --mpi={_SRUN_PLUGIN[family]}`{library}; `srun --mpi=list` shows what this "
            "cluster has."
        )
    if by in FLUX.size:
        plugin = "pmix" if family in ("openmpi", "spectrum") else "simple"
        return f"Start it with `flux run -o pmi={plugin}`."
    if by in JSRUN.size:
        return (
            "jsrun starts programs of the MPI that belongs to it: load that one (module load spectrum-mpi)."
        )
    return (
        "Start it with the mpirun that belongs to this library, on one machine with "
        f"`mpistrat run -n {started.tasks}`, which finds it."
    )
