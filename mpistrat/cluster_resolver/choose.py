"""The choice of a resolver for the environment of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpistrat.cluster_resolver import slurm as slurm_step
from mpistrat.cluster_resolver.flux import FluxClusterResolver
from mpistrat.cluster_resolver.mpi import (
    LSF_JOB,
    Launched,
    LaunchedClusterResolver,
    MpiClusterResolver,
    by_jsrun,
    launched,
)
from mpistrat.cluster_resolver.resolver import ClusterResolver
from mpistrat.cluster_resolver.roles import TF_CONFIG, TFConfigClusterResolver, config
from mpistrat.cluster_resolver.slurm import SlurmClusterResolver
from mpistrat.launch.launchers import FLUX, HYDRA, JSRUN, PMIX
from mpistrat.launch.slurm import left_over

_SRUN = slurm_step.SIZE


def resolve(
    environ: Mapping[str, str] | None = None, *, port_base: int = 8888, rpc_layer: str | None = "grpc"
) -> ClusterResolver:
    """Return the resolver for the launcher that started this process.

    The innermost launcher wins. ``mpirun`` inside a batch job wins over the variables of Slurm, which describe the
    daemons of ``mpirun`` there. A task of ``flux run`` wins over the Slurm job that Flux runs in. A step wins over
    its job. ``TF_CONFIG`` is used if no launcher started this process. MPI is not asked.

    Parameters
    ----------
    environ : mapping, optional
        Environment to read; ``os.environ`` by default.
    port_base : int
        Port of the first rank of a node. The next rank of the node has the next port.
    rpc_layer : str or None
        Protocol of the addresses that `master` returns.

    Returns
    -------
    ClusterResolver
        ``reason`` says why this resolver was chosen; ``placement`` names the source of each fact.

    Raises
    ------
    RuntimeError
        If the launcher's variables are incomplete, or contradict each other.
    ValueError
        If a variable has a value that cannot be read.

    Examples
    --------
    >>> environ = {
    ...     "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    ...     "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_HOSTNAME": "n1", "SLURM_JOB_ID": "9",
    ...     "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1",
    ... }
    >>> resolver = resolve(environ)
    >>> print(resolver.reason)
    mpirun of Open MPI started this rank (OMPI_COMM_WORLD_RANK=2); SLURM_PROCID and SLURM_STEP_* are not its own
    >>> placement = resolver.placement
    >>> placement.rank, placement.size, placement.node, placement.local_rank, placement.nodes
    (2, 4, 1, 0, ('n0', 'n1'))
    """
    # None stays None: a resolver that reads os.environ may also use the name of this machine.
    snapshot = None if environ is None else dict(environ)
    environ = os.environ if snapshot is None else snapshot
    by = launched(environ)
    resolver: LaunchedClusterResolver | SlurmClusterResolver | TFConfigClusterResolver
    if _started_by(environ, FLUX.rank[0], FLUX.size[0], by):
        resolver = FluxClusterResolver(port_base, rpc_layer, environ=snapshot)
        resolver.reason = _reason(environ, "flux run", FLUX.rank[0])
    elif environ.get(LSF_JOB) and by_jsrun(environ):
        resolver = MpiClusterResolver(None, port_base, rpc_layer, environ=snapshot)
        resolver.reason = _reason(environ, "jsrun", JSRUN.rank[0])
    elif _started_by_srun(environ, by):
        resolver = SlurmClusterResolver(port_base=port_base, auto_set_gpu=False, rpc_layer=rpc_layer, environ=snapshot)
        resolver.reason = _reason(environ, "srun", _SRUN)
    elif by is None and config(environ).get("cluster"):
        rpc_layer = config(environ).get("rpc_layer", rpc_layer)
        resolver = TFConfigClusterResolver(rpc_layer=rpc_layer, environ=snapshot)
        resolver.reason = "TF_CONFIG names the cluster, and no launcher started this process"
    else:
        resolver = MpiClusterResolver(None, port_base, rpc_layer, environ=snapshot)
        resolver.reason = _of_mpirun(environ, by)
    if not isinstance(resolver, TFConfigClusterResolver) and environ.get("TF_CONFIG"):
        jobs_only = resolver.roles.source == TF_CONFIG
        resolver.reason += "; TF_CONFIG " + ("tells the jobs" if jobs_only else "is not used: it is not the launcher's")
    return resolver


def _started_by(environ: Mapping[str, str], rank: str, size: str, by: Launched | None) -> bool:
    """Return whether a scheduler's launcher started this process, and not an mpirun inside its task."""
    if not environ.get(rank) or not environ.get(size):
        return False
    if by is None:
        return True
    if by.alone:
        return False
    # A scheduler's launcher may speak PMI or PMIx itself: then both sets of variables hold the same numbers.
    return environ[rank] == str(by.rank) and (by.size is None or environ[size] == str(by.size))


def _started_by_srun(environ: Mapping[str, str], by: Launched | None) -> bool:
    if environ.get("SLURM_EXTERNAL_LAUNCHER"):  # the step runs mpiexec's proxies
        return False
    if by is not None and by.alone and _speaks_to_srun(environ):
        by = None  # a rank of an mpirun called sbatch or srun, which passed on the variables of that mpirun
    return _started_by(environ, slurm_step.RANK, _SRUN, by) and left_over(environ) is None


def _speaks_to_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun's own PMI or PMIx server gave this process its rank in MPI."""
    rank, size = environ.get(slurm_step.RANK), environ.get(_SRUN)
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix"):
        return rank is not None and environ.get(PMIX.rank[0]) == rank
    # Daemons of mpirun, one on each node, pass on the variables that srun set for them.
    daemons = size == environ.get("SLURM_STEP_NUM_NODES", size)
    return not daemons and rank is not None and (environ.get(HYDRA.rank[0]), environ.get(HYDRA.size[0])) == (rank, size)


def _reason(environ: Mapping[str, str], launcher: str, variable: str) -> str:
    return f"{launcher} started this task ({variable}={environ[variable]})"


def _of_mpirun(environ: Mapping[str, str], by: Launched | None) -> str:
    if by is not None:
        reason = f"{by.launcher} started this rank ({by.sources['rank']}={by.rank})"
        if environ.get(slurm_step.RANK):
            reason += f"; {slurm_step.RANK} and SLURM_STEP_* are not its own"
        return reason
    reason = "no launcher started this process: it is rank 0 of 1"
    if environ.get("SLURM_JOB_ID"):
        over = left_over(environ)
        why = f"{_SRUN} is not set" if over is None else f"the step is another job's ({over})"
        reason += f"; {why}, as in a batch script, where srun or mpirun starts the ranks"
    return reason
