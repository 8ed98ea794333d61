"""A resolver for the ranks of a program in a PBS job (OpenPBS, PBS Professional, TORQUE)."""

from __future__ import annotations

from collections.abc import Mapping

from mpistrat.cluster_resolver.mpi import pbs_job
from mpistrat.cluster_resolver.mpi.launched import LaunchedClusterResolver
from mpistrat.cluster_resolver.mpi.resolver import placement_in_job


class PbsClusterResolver(LaunchedClusterResolver):
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

    def __init__(
        self,
        port_base: int = 8888,
        rpc_layer: str | None = "grpc",
        *,
        environ: Mapping[str, str] | None = None,
    ):
        why = "PBS sets it in its jobs; is this process in a job?"
        placement = placement_in_job(pbs_job, environ, why)
        super().__init__(placement, port_base, rpc_layer, environ=environ)
