"""The environment variables of launchers, in one table that all other files read, and the key of a launch.

Variables with which a scheduler describes its job (such as ``SLURM_JOB_NODELIST``) are in the file of that scheduler.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import NamedTuple

from mpistrat.launch import proc
from mpistrat.representation import grouped

_HYDRA_PORT = "--control-port"


class LauncherVariables(NamedTuple):
    """The environment variables of a launcher. Of several variables for one fact, the most reliable comes first."""

    name: str  # the name of the launcher in messages
    # the next five are variables that hold numbers
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    host: tuple[str, ...] = ()  # variables that hold the name of the node
    # variables with equal values on all ranks of a launch, and other values in other launches at the same time
    launch: tuple[str, ...] = ()
    # whether only this launcher sets these variables, and not also the launcher of a scheduler
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
# PALS has no own variable for the number of ranks. srun --mpi=cray_shasta sets these, too. That of older Slurm
# and flux run -o pmi=cray-pals set PALS_RANKID, PALS_NODEID and PALS_APID only.
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
# mpiexec of Fugaku and of its relatives. The size is the one of the job, so a script of the job has it, too.
FUJITSU = LauncherVariables(
    "mpiexec of Fujitsu MPI",
    rank=("OMPI_MCA_orte_ess_vpid",),
    size=("PJM_MPI_PROC",),
    local_rank=("PLE_RANK_ON_NODE",),
    local_size=("FLIB_NUM_PROCESS_ON_NODE",),
    host=("PMIX_HOSTNAME",),
)
PMIX = LauncherVariables(
    "a launcher that speaks PMIx", rank=("PMIX_RANK",), size=(), host=("PMIX_HOSTNAME",), launch=("PMIX_NAMESPACE",)
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

# Launchers of other libraries: they start processes that MPI does not know, and give each of them its rank.
TORCHRUN = LauncherVariables(
    "torchrun, accelerate launch or the like", rank=("RANK",), size=("WORLD_SIZE",), local_rank=("LOCAL_RANK",)
)
HOROVODRUN = LauncherVariables("horovodrun", rank=("HOROVOD_RANK",), size=("HOROVOD_SIZE",))
WITHOUT_MPI = (TORCHRUN, HOROVODRUN)

# The most specific first: many launchers also set the variables of the last ones.
MPIRUN = (OPEN_MPI, *MVAPICH, PALS, HYDRA, FUJITSU, PMIX)
# The innermost first: mpirun runs inside a scheduler's step, not the other way round.
LAUNCHERS = (*MPIRUN, JSRUN, FLUX, SRUN)


_KEYS = tuple(launcher.launch for launcher in (PMIX, JSRUN, PALS, FLUX, SRUN))  # the innermost first


def key_of(environ: Mapping[str, str], *, one_node: bool, parent: int | None = None) -> str | None:
    """Return a text that only the ranks of this launch share, or None if it is not known.

    On ``one_node`` the process that started the ranks distinguishes launches: ``parent``, by default this one's.
    """
    parent = os.getppid() if parent is None else parent
    for names in _KEYS:
        if all(environ.get(name) for name in names):
            return " ".join(f"{name}={environ[name]}" for name in (*names, "SLURM_RESTART_COUNT") if name in environ)
    if all(environ.get(name) for name in HYDRA.size):
        process = parent
        while process > 1:  # a script may be between the launcher and this process
            words = proc.command(process)
            if _HYDRA_PORT in words[:-1]:  # where mpiexec listens, the same on all nodes
                return f"mpiexec {words[words.index(_HYDRA_PORT) + 1]}"
            process = proc.parent(process)
    if one_node:  # with the start of the process: Linux reuses process numbers
        return f"{os.uname().nodename} {parent} {proc.started(parent)}"
    return None


def hashed(key: str) -> str:
    """Return a hash of a key that is short enough for the name of a file."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def ranks_below(launcher: int) -> dict[int, int]:
    """Return the ranks that a launcher has started: process id -> rank. None without /proc (macOS)."""
    children = grouped((proc.parent(process), process) for process in proc.process_ids())
    ranks, pending = {}, [launcher]
    while pending:
        for process in children.get(pending.pop(), []):
            rank = rank_of(process)
            if rank is None:
                pending.append(process)  # a daemon of the launcher
            else:
                ranks[process] = rank
    return ranks


def rank_of(process: int) -> int | None:
    """Return the rank of a process, or None if the process is not a rank or does not exist."""
    environ = proc.environ(process)
    value = next((environ[name] for name in (*OPEN_MPI.rank, *HYDRA.rank) if name in environ), "")
    return int(value) if value.isdecimal() else None
