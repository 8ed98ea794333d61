"""What the launcher of this process said: how many tasks it started, and which variables are its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Started(NamedTuple):
    """How many tasks a launcher says it started, and the variable that says so."""

    tasks: int
    variable: str


# The innermost launcher first: mpirun runs inside a step of a scheduler, not the other way round.
# SLURM_NTASKS is not here: `python prog.py` in a batch script sees it too. Nor are the counts per node
# (MPI_LOCALNRANKS, PALS_LOCAL_SIZE), which come with PMI_SIZE.
_COUNTS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun of Open MPI",
    "MV2_COMM_WORLD_SIZE": "mpirun of MVAPICH",
    "PMI_SIZE": "mpirun of MPICH or Intel MPI, or another launcher that speaks PMI",
    "JSM_NAMESPACE_SIZE": "jsrun",
    "FLUX_JOB_SIZE": "flux run",
    "SLURM_STEP_NUM_TASKS": "srun",
}

_OWN_COUNT = {
    "openmpi": "OMPI_COMM_WORLD_SIZE",
    "spectrum": "OMPI_COMM_WORLD_SIZE",
    "mpich": "PMI_SIZE",
    "intel": "PMI_SIZE",
    "cray": "PMI_SIZE",
    "mvapich": "PMI_SIZE",
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

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "HYDI_CONTROL_FD")
_PREFIXES = (
    *("OMPI_", "OPAL_", "PMIX_", "PRTE_"),
    *("PMI_", "HYDI_", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "MV2_COMM_WORLD_"),
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
        if count is not None and not (variable == "SLURM_STEP_NUM_TASKS" and _is_left_over(environ)):
            return Started(count, variable)
    return None


def _is_left_over(environ: Mapping[str, str]) -> bool:
    from mpistrat.runtime.left_over_step import left_over  # 0.6 ms that only a step of Slurm needs

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
    RuntimeError
        If the size is 1 although the launcher started several tasks.
    """
    if size != 1:
        return
    family = library_family(library)
    if _count(environ, _OWN_COUNT.get(family, "")) == 1:
        return  # started alone by the library's own launcher, inside a job of another one
    started = started_tasks(environ)
    if started is None or started.tasks == 1:
        return
    name = library.rstrip("\0").strip().partition("\n")[0].partition(",")[0]
    name = " ".join(name.split())
    raise RuntimeError(
        f"every task of this job is rank 0 of 1: the launcher started {started.tasks} tasks "
        f"({started.variable}={environ[started.variable]}, set by {_COUNTS[started.variable]}), but the MPI "
        f"library that is loaded ({name}) does not understand that launcher. "
        f"{_remedy(started, family, environ)} A program that is meant to be alone inside such a job is "
        f"started with `env -u {started.variable}`."
    )


def srun_plugin(family: str) -> str | None:
    """What ``srun --mpi=`` has to be for a library of this family, None if that is not known."""
    return _SRUN_PLUGIN.get(family)


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for starting another MPI job: without what the launcher of this process put there.

    What a user may have set (``OMPI_MCA_*`` and the like) stays. Outside of a job nothing is removed.
    """
    if not any(variable in environ for variable in _RANKS):
        return dict(environ)
    return {name: value for name, value in environ.items() if not _is_launchers(name)}


def launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that tell how many tasks there are and which one this is."""
    ranks = (*_RANKS[:-1], "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK", "SLURM_PROCID", "PALS_RANKID")
    also = ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", "PALS_APID", "LSB_JOBID")
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
    if by == "PMI_SIZE":  # srun and flux run speak PMI, too
        also = ("FLUX_JOB_SIZE", "SLURM_STEP_NUM_TASKS")
        by = next((name for name in also if _count(environ, name) == started.tasks), by)
    if by == "SLURM_STEP_NUM_TASKS":
        if family not in _SRUN_PLUGIN:
            return "Start it with `srun --mpi=...`; `srun --mpi=list` shows what this cluster has."
        library = " and I_MPI_PMI_LIBRARY set to the path of libpmi2.so" if family == "intel" else ""
        return (
            f"Start it with `srun --mpi={_SRUN_PLUGIN[family]}`{library}; `srun --mpi=list` shows what this "
            "cluster has."
        )
    if by == "FLUX_JOB_SIZE":
        plugin = "pmix" if family in ("openmpi", "spectrum") else "simple"
        return f"Start it with `flux run -o pmi={plugin}`."
    if by == "JSM_NAMESPACE_SIZE":
        return (
            "jsrun starts programs of the MPI that belongs to it: load that one (module load spectrum-mpi)."
        )
    return (
        "Start it with the mpirun that belongs to this library, on one machine with "
        f"`mpistrat run -n {started.tasks}`, which finds it."
    )
