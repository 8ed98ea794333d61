"""A resolver for the ranks of a program in an LSF job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpistrat.cluster_resolver.mpi import lsf_job
from mpistrat.cluster_resolver.mpi.launched import LaunchedClusterResolver
from mpistrat.cluster_resolver.mpi.launcher import Launched, launched, told
from mpistrat.cluster_resolver.mpi.resolver import placement_in_job
from mpistrat.runtime.process.launchers import JSRUN


class LsfClusterResolver(LaunchedClusterResolver):
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

    def __init__(
        self,
        port_base: int = 8888,
        rpc_layer: str | None = "grpc",
        *,
        environ: Mapping[str, str] | None = None,
    ):
        by = by_jsrun(os.environ if environ is None else environ)
        why = "LSF sets it in its jobs; is this process in a job?"
        placement = placement_in_job(lsf_job, environ, why, by)
        super().__init__(placement, port_base, rpc_layer, environ=environ)


def by_jsrun(environ: Mapping[str, str]) -> Launched | None:
    """Return the facts from jsrun, or None for a rank that mpirun or no jsrun started.

    jsrun also sets the variables of Open MPI. If these have other values, an mpirun inside jsrun started the rank.
    """
    step, inner = told(environ, JSRUN), launched(environ)
    if step is None or inner is None:
        return step
    return step if inner.rank == step.rank and inner.size in (None, step.size) else None
