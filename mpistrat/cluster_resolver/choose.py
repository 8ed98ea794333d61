"""The choice of a resolver for the environment of this process, and the resolver for the tasks of a Flux job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpistrat.cluster_resolver import slurm as slurm_step
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.mpi import (
    LSF_JOB,
    Launched,
    LaunchedClusterResolver,
    MpiClusterResolver,
    by_jsrun,
    launched,
    place,
    told,
)
from mpistrat.cluster_resolver.placement import Allocation, Placement, integer, required
from mpistrat.cluster_resolver.resolver import ClusterResolver
from mpistrat.cluster_resolver.roles import TF_CONFIG, TFConfigClusterResolver, config
from mpistrat.cluster_resolver.slurm import SlurmClusterResolver
from mpistrat.launch.launchers import FLUX, HYDRA, JSRUN, PMIX
from mpistrat.launch.slurm import expand_hostlist, left_over

_NODES = "FLUX_JOB_NNODES"


class FluxClusterResolver(LaunchedClusterResolver):
    """The tasks that ``flux run`` or ``flux submit`` started: all are workers.

    Flux tells a task its number in the job and on its node, and the number of nodes, but not their names.
    `cluster_spec` and `master` need the names and run the command ``flux jobs``.

    Parameters
    ----------
    port_base, rpc_layer, environ : optional
        As of `MpiClusterResolver`.
    nodes : str or sequence of str, optional
        Names of the nodes, in place of running ``flux jobs``; a string is a list such as ``"node[1-3]"``.

    Raises
    ------
    RuntimeError
        If this process is not a task of Flux.
    ValueError
        If a variable has a value that cannot be read, or ``nodes`` has not as many names as the job has nodes.

    Examples
    --------
    >>> environ = {"FLUX_JOB_ID": "f23r45t", "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "2", "FLUX_TASK_RANK": "3",
    ...            "FLUX_TASK_LOCAL_ID": "1"}
    >>> FluxClusterResolver(nodes="node[1-2]", environ=environ).master()
    'grpc://node2:8889'
    """

    def __init__(
        self,
        port_base: int = 8888,
        rpc_layer: str | None = "grpc",
        *,
        nodes: str | Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ):
        self._here = environ is None
        self._environ = os.environ if environ is None else environ
        required(self._environ, FLUX.rank[0], "Flux sets it for every task; is this program started by flux run?")
        super().__init__(self._place(None), port_base, rpc_layer, environ=self._environ)
        if nodes is not None:
            names = expand_hostlist(nodes) if isinstance(nodes, str) else list(nodes)
            self._placement = self._place(names)

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks.

        Raises
        ------
        RuntimeError
            If the names of the nodes are not given and Flux does not tell them, or if the node of each task is
            unknown.
        """
        if self._placement.nodes is None:
            self._placement = self._place(self._asked())
        return super().cluster_spec()

    def _place(self, nodes: list[str] | None) -> Placement:
        environ = self._environ
        by = told(environ, FLUX)
        assert by is not None
        count = integer(environ, _NODES)
        if nodes is not None and count is not None and len(nodes) != count:
            raise ValueError(f"the job has {count} nodes ({_NODES}), not {len(nodes)}: {nodes}")
        if count is None:
            count = len(nodes) if nodes else None
        job = (environ["FLUX_JOB_ID"], "FLUX_JOB_ID") if environ.get("FLUX_JOB_ID") else None
        allocations = []
        if count and by.size is not None:
            names = tuple(nodes) if nodes else tuple(f"\0{node}" for node in range(count))
            even = (by.size // count,) * count if by.size % count == 0 else None
            allocations.append(Allocation(names, _NODES, even))
        placement = place(environ, by, allocations, here=self._here and nodes is not None, job=job)
        if nodes is None:
            placement = replace(placement, nodes=None, allocation=None, host=by.host)
        return placement

    def _asked(self) -> list[str]:
        command = ["flux", "jobs", "-n", "-o", "{nodelist}", self._environ.get("FLUX_JOB_ID", "")]
        try:
            ended = subprocess.run(
                command, env=dict(self._environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(_unknown(command, str(error))) from error
        if ended.returncode != 0 or not ended.stdout.strip():
            raise RuntimeError(_unknown(command, (ended.stderr + ended.stdout).strip() or "it printed nothing"))
        return expand_hostlist(ended.stdout.strip())


def _unknown(command: list[str], why: str) -> str:
    return (
        f"the names of the job's nodes are not in the environment, and `{' '.join(command)}` does not tell them: "
        f"{why}. Give them: FluxClusterResolver(nodes='node[1-3]'), or ask MPI: MpiClusterResolver(comm)"
    )


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
    given = None if environ is None else dict(environ)
    environ = os.environ if given is None else given
    by = launched(environ)
    resolver: LaunchedClusterResolver | SlurmClusterResolver | TFConfigClusterResolver
    if _started_by(environ, FLUX.rank[0], FLUX.size[0], by):
        resolver = FluxClusterResolver(port_base, rpc_layer, environ=given)
        resolver.reason = _reason(environ, "flux run", FLUX.rank[0])
    elif environ.get(LSF_JOB) and by_jsrun(environ):
        resolver = MpiClusterResolver(None, port_base, rpc_layer, environ=given)
        resolver.reason = _reason(environ, "jsrun", JSRUN.rank[0])
    elif _started_by_srun(environ, by):
        resolver = SlurmClusterResolver(port_base=port_base, auto_set_gpu=False, rpc_layer=rpc_layer, environ=given)
        resolver.reason = _reason(environ, "srun", _SRUN)
    elif by is None and config(environ).get("cluster"):
        rpc_layer = config(environ).get("rpc_layer", rpc_layer)
        resolver = TFConfigClusterResolver(rpc_layer=rpc_layer, environ=given)
        resolver.reason = "TF_CONFIG names the cluster, and no launcher started this process"
    else:
        resolver = MpiClusterResolver(None, port_base, rpc_layer, environ=given)
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
