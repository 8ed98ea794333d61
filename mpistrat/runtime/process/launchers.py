"""The environment variables of launchers: one table, which all other files read.

What a scheduler tells about its job (``SLURM_JOB_NODELIST`` and the like) stands in the file of that scheduler.
"""

from __future__ import annotations

from typing import NamedTuple


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
    launch : tuple of str
        Variables that all ranks of a launch have in common, and no other launch has at the same time.
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
    launch: tuple[str, ...] = ()
    alone: bool = False


OPEN_MPI = LauncherVariables(
    "mpirun of Open MPI",
    rank=("OMPI_COMM_WORLD_RANK",),
    size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    host=("PMIX_HOSTNAME",),
    launch=("PMIX_NAMESPACE",),
    alone=True,
)
MVAPICH = tuple(
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
PALS = LauncherVariables(
    "mpiexec of Cray PALS",
    rank=("PALS_RANKID",),
    size=("PMI_SIZE",),
    local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
    local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    node=("PALS_NODEID",),
    host=("PMIX_HOSTNAME",),
    launch=("PALS_APID",),
)
HYDRA = LauncherVariables(
    "mpiexec of MPICH, Intel MPI or the like",
    rank=("PMI_RANK",),
    size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    host=("PMI_HOSTNAME",),
)
PMIX = LauncherVariables(
    "a launcher that speaks PMIx",
    rank=("PMIX_RANK",),
    size=(),
    host=("PMIX_HOSTNAME",),
    launch=("PMIX_NAMESPACE",),
)
JSRUN = LauncherVariables(
    "jsrun",
    rank=("JSM_NAMESPACE_RANK",),
    size=("JSM_NAMESPACE_SIZE",),
    local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
    local_size=("JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    host=("PMIX_HOSTNAME",),
    launch=("JSM_NAMESPACE_ID", "LSB_JOBID"),
)
FLUX = LauncherVariables(
    "flux run",
    rank=("FLUX_TASK_RANK",),
    size=("FLUX_JOB_SIZE",),
    local_rank=("FLUX_TASK_LOCAL_ID",),
    host=("PMIX_HOSTNAME",),
    launch=("FLUX_JOB_ID",),
)
# SLURM_NTASKS is not here: `python prog.py` in a batch script sees it too.
SRUN = LauncherVariables(
    "srun",
    rank=("SLURM_PROCID",),
    size=("SLURM_STEP_NUM_TASKS",),
    local_rank=("SLURM_LOCALID",),
    node=("SLURM_NODEID",),
    launch=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)

# A launcher that sets the first of these knows the most about its ranks; many set the variables of the last ones.
MPIRUN = (OPEN_MPI, *MVAPICH, PALS, HYDRA, PMIX)
# The innermost first: mpirun runs inside a step of a scheduler, not the other way round.
LAUNCHERS = (*MPIRUN, JSRUN, FLUX, SRUN)
