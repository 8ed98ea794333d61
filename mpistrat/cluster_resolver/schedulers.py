"""Resolvers of the schedulers Flux, LSF and PBS."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.layout import Allocation
from mpistrat.cluster_resolver.mpi import lsf_job, pbs_job
from mpistrat.cluster_resolver.mpi.launched import Launched, LaunchedClusterResolver, launched, place, told
from mpistrat.cluster_resolver.mpi.resolver import ALONE
from mpistrat.cluster_resolver.placement import Placement
from mpistrat.cluster_resolver.variables import integer, required
from mpistrat.launch.hostlist import expand_hostlist
from mpistrat.launch.launchers import FLUX, JSRUN

_NODES = "FLUX_JOB_NNODES"


class FluxClusterResolver(LaunchedClusterResolver):
    """The tasks that ``flux run`` or ``flux submit`` started: all are workers.

    Flux tells a task its number in the job and on its node, and the number of nodes, but not their names.
    `cluster_spec` and `master` need the names and run the command ``flux jobs``.

    Parameters
    ----------
    port_base : int
        Port of the first task of a node. The next task of the node has the next port.
    rpc_layer : str or None
        Protocol of the addresses that `master` returns.
    nodes : str or sequence of str, optional
        Names of the nodes, in place of running ``flux jobs``; a string is a list such as ``"node[1-3]"``.
    environ : mapping, optional
        Environment to read; ``os.environ`` by default.

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
                command,
                env=dict(self._environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60,
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


class _InJob(LaunchedClusterResolver):
    """The ranks of a program in the job of a scheduler, whose variables ``_job`` reads."""

    _job: ModuleType
    _launched = staticmethod(launched)

    def __init__(
        self,
        port_base: int = 8888,
        rpc_layer: str | None = "grpc",
        *,
        environ: Mapping[str, str] | None = None,
    ):
        here = environ is None
        environ = os.environ if environ is None else environ
        job = self._job
        required(environ, job.JOB, "the scheduler sets it in its jobs; is this process in a job?")
        by = self._launched(environ) or ALONE
        placement = place(environ, by, job.allocations(environ), here=here, job=job.job(environ))
        super().__init__(placement, port_base, rpc_layer, environ=environ)


class LsfClusterResolver(_InJob):
    """The ranks of a program in an LSF job: all are workers.

    LSF names the nodes (``LSB_MCPU_HOSTS``). ``jsrun`` or ``mpirun`` starts the ranks and tells them their
    numbers. The job script itself is rank 0 of 1.

    Parameters
    ----------
    port_base : int
        Port of the first rank of a node. The next rank of the node has the next port.
    rpc_layer : str or None
        Protocol of the addresses that `master` returns.
    environ : mapping, optional
        Environment to read; ``os.environ`` by default.

    Raises
    ------
    RuntimeError
        If this process is not in an LSF job, or the launcher does not tell the number of ranks.
    ValueError
        If a variable has a value that cannot be read.

    Examples
    --------
    >>> environ = {"LSB_JOBID": "17", "LSB_MCPU_HOSTS": "batch1 1 a 42 b 42", "JSM_NAMESPACE_RANK": "3",
    ...            "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1", "JSM_NAMESPACE_LOCAL_SIZE": "2"}
    >>> LsfClusterResolver(environ=environ).master()
    'grpc://b:8889'
    """

    _job = lsf_job

    @staticmethod
    def _launched(environ: Mapping[str, str]) -> Launched | None:
        return by_jsrun(environ) or launched(environ)


def by_jsrun(environ: Mapping[str, str]) -> Launched | None:
    """Return the facts from jsrun, or None for a rank that mpirun or no jsrun started.

    jsrun also sets the variables of Open MPI. If these have other values, an mpirun inside jsrun started the rank.
    """
    step, inner = told(environ, JSRUN), launched(environ)
    if step is None or inner is None:
        return step
    return step if inner.rank == step.rank and inner.size in (None, step.size) else None


class PbsClusterResolver(_InJob):
    """The ranks of a program in a PBS job: all are workers.

    PBS names the nodes (``PBS_NODEFILE``). ``mpiexec`` starts the ranks and tells them their numbers. The job
    script itself is rank 0 of 1.

    Parameters
    ----------
    port_base : int
        Port of the first rank of a node. The next rank of the node has the next port.
    rpc_layer : str or None
        Protocol of the addresses that `master` returns.
    environ : mapping, optional
        Environment to read; ``os.environ`` by default.

    Raises
    ------
    RuntimeError
        If this process is not in a PBS job, or the launcher does not tell the number of ranks.
    ValueError
        If a variable has a value that cannot be read.

    Examples
    --------
    >>> environ = {"PBS_JOBID": "17.server", "PALS_RANKID": "1", "PMI_SIZE": "2", "PALS_LOCAL_RANKID": "1",
    ...            "PALS_LOCAL_SIZE": "2", "PMIX_HOSTNAME": "x1000c0"}
    >>> PbsClusterResolver(environ=environ).cluster_spec()
    ClusterSpec({'worker': ['x1000c0:8888', 'x1000c0:8889']})
    """

    _job = pbs_job
