"""A resolver for the ranks of an MPI program, from its launcher's variables or from MPI itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpistrat.cluster_resolver import gpus
from mpistrat.cluster_resolver.layout import Allocation
from mpistrat.cluster_resolver.mpi.launched import (
    Launched,
    LaunchedClusterResolver,
    by_jsrun,
    launched,
    lsf_allocations,
    lsf_job,
    pbs_allocations,
    pbs_job,
    place,
)
from mpistrat.cluster_resolver.placement import Placement, with_facts
from mpistrat.cluster_resolver.slurm import step as slurm_step
from mpistrat.cluster_resolver.variables import own_host

if TYPE_CHECKING:
    from mpistrat.runtime.topology import Topology

# The facts of a program that no launcher started.
ALONE = Launched(
    launcher="no launcher",
    rank=0,
    size=1,
    local_rank=None,
    local_size=None,
    node=None,
    host=None,
    sources=dict.fromkeys(("launcher", "rank", "size"), "no launcher's variable is set"),
)
# Of each scheduler: how the name of a job, and its nodes, are read.
_SCHEDULERS = ((slurm_step.job, slurm_step.allocations), (pbs_job, pbs_allocations), (lsf_job, lsf_allocations))


class MpiClusterResolver(LaunchedClusterResolver):
    """The ranks of an MPI program. Jobs take consecutive ranks; without jobs, all ranks are workers.

    It reads the variables of Open MPI, MPICH, Intel MPI, MVAPICH, Cray PALS, jsrun, and other launchers that speak
    PMI. They tell a rank its number and its place on its node; the nodes come from the scheduler of the job: Slurm,
    PBS or LSF. A program that no launcher started is rank 0 of 1. With ``comm``, MPI itself is asked, and all facts
    are known.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Communicator of the ranks. Making the resolver is then collective over it.
    port_base : int
        Port of the first rank of a node. The next rank of the node has the next port.
    rpc_layer : str or None
        Protocol of the addresses that `master` returns.
    jobs : mapping, optional
        Number of tasks of each job, in the order in which they get ranks. By default the jobs of ``MPISTRAT_ROLES``
        or of a ``TF_CONFIG`` with parameter servers.
    spread : str, optional
        Job that has the last rank of each node, such as ``"ps"``. The other jobs share the rest.
    environ : mapping, optional
        Environment to read; ``os.environ`` by default.

    Attributes
    ----------
    roles : Roles
        Rank of each task.

    Raises
    ------
    RuntimeError
        If the launcher does not tell the number of ranks. If the jobs have more or fewer tasks than there are ranks,
        or variables of the environment contradict each other. If the node of each rank is needed and not known.
    ValueError
        If a variable has a value that cannot be read, a number of tasks is negative, or the job to spread has another
        number of tasks than there are nodes.
    TypeError
        If ``jobs`` or ``spread`` has another type.

    Examples
    --------
    >>> environ = {
    ...     "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    ...     "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_HOSTNAME": "n2",
    ...     "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "0",
    ... }
    >>> resolver = MpiClusterResolver(environ=environ)
    >>> resolver.cluster_spec()
    ClusterSpec({'worker': ['n1:8888', 'n1:8889', 'n2:8888', 'n2:8889']})
    >>> resolver.placement.rank, resolver.placement.sources["rank"]
    (3, 'OMPI_COMM_WORLD_RANK')
    >>> resolver = MpiClusterResolver(jobs={"chief": 1, "worker": 1, "ps": 2}, spread="ps", environ=environ)
    >>> resolver.task_type, resolver.task_id, resolver.roles.ranks
    ('ps', 1, {'chief': (0,), 'worker': (2,), 'ps': (1, 3)})
    """

    def __init__(
        self,
        comm: Any = None,
        port_base: int = 8888,
        rpc_layer: str | None = "grpc",
        *,
        jobs: Mapping[str, int] | None = None,
        spread: str | None = None,
        environ: Mapping[str, str] | None = None,
    ):
        here = environ is None
        environ = os.environ if environ is None else environ
        if comm is not None:
            placement = _asked(comm, environ)
        else:
            allocations, job = allocations_of(environ)
            started = by_jsrun(environ) or launched(environ) or ALONE
            placement = place(environ, started, allocations, here=here, job=job)
        super().__init__(placement, port_base, rpc_layer, jobs, spread, environ)


def allocations_of(environ: Mapping[str, str]) -> tuple[list[Allocation], tuple[str, str] | None]:
    """Return the nodes of the job and its name, from the variables of its scheduler."""
    for job_of, allocations in _SCHEDULERS:
        job, found = job_of(environ), allocations(environ)
        if job is not None or found:
            return found, job
    return [], None


def _asked(comm: Any, environ: Mapping[str, str]) -> Placement:
    """Return the place of this rank as MPI knows it. Collective."""
    from mpistrat.runtime.topology import Topology

    topology = Topology.of(comm)
    names = topology.all_gather_object(own_host())
    known = placement_in(topology)
    assert known.node is not None
    nodes = tuple(names[ranks[0]] for ranks in topology.nodes)
    on_node = slurm_step.gpus_on_node(environ, known.rank, known.size, known.local_size)
    known = gpus.with_gpus(with_facts(known, "MPI", nodes=nodes, host=nodes[known.node]), environ, on_node)
    _, job = allocations_of(environ)
    return known if job is None else with_facts(known, job[1], job=job[0])


def placement_in(topology: Topology) -> Placement:
    """Return the place of this rank as MPI knows it, without node names and without communication."""
    node, local_rank = topology.place_of(topology.rank)
    node_of_rank = {rank: node for node, ranks in enumerate(topology.nodes) for rank in ranks}
    facts: dict[str, Any] = {
        "launcher": "MPI",
        "size": topology.size,
        "rank": topology.rank,
        "node": node,
        "local_rank": local_rank,
        "local_size": len(topology.nodes[node]),
        "ranks_per_node": topology.ranks_per_node,
        "node_of_rank": tuple(node_of_rank[rank] for rank in range(topology.size)),
    }
    return Placement(**facts, sources=dict.fromkeys(facts, "MPI"))
