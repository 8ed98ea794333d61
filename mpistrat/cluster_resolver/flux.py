"""A resolver for the tasks of a Flux job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.mpi import LaunchedClusterResolver, launched_by, placement_of_rank
from mpistrat.cluster_resolver.placement import Allocation, Placement, integer, required
from mpistrat.launch.launchers import FLUX
from mpistrat.launch.slurm import expand_hostlist

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
        super().__init__(self._placement_on(None), port_base, rpc_layer, environ=self._environ)
        if nodes is not None:
            names = expand_hostlist(nodes) if isinstance(nodes, str) else list(nodes)
            self._placement = self._placement_on(names)

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks.

        Raises
        ------
        RuntimeError
            If the names of the nodes are not given and Flux does not tell them, or if the node of each task is
            unknown.
        """
        if self._placement.nodes is None:
            self._placement = self._placement_on(self._node_names())
        return super().cluster_spec()

    def _placement_on(self, nodes: list[str] | None) -> Placement:
        environ = self._environ
        by = launched_by(environ, FLUX)
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
        placement = placement_of_rank(environ, by, allocations, here=self._here and nodes is not None, job=job)
        if nodes is None:
            placement = replace(placement, nodes=None, allocation=None, host=by.host)
        return placement

    def _node_names(self) -> list[str]:
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
