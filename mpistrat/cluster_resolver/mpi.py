"""Resolvers for the ranks of an MPI program, from its launcher's and scheduler's variables or from MPI itself.

PBS has a file with one line for each expected rank, and LSF the nodes and their slots, ``LSB_MCPU_HOSTS="a 4 b 4"``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat.cluster_resolver import gpus
from mpistrat.cluster_resolver import slurm as slurm_step
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.placement import (
    Allocation,
    Placement,
    block,
    first_of,
    from_lines,
    local_rank_of,
    own_host,
    plane,
    position_of,
    ranks_on,
    with_facts,
)
from mpistrat.cluster_resolver.resolver import ClusterResolver
from mpistrat.cluster_resolver.roles import WORKER, Roles, checked_task, dealt, requested_jobs
from mpistrat.launch.launchers import FLUX, JSRUN, MPIRUN, OPEN_MPI, LauncherVariables
from mpistrat.launch.slurm import expand_hostlist, parsed
from mpistrat.process import mpi

if TYPE_CHECKING:
    from mpistrat.runtime.topology import Topology

LSF_JOB, _LSF_HOSTS = "LSB_JOBID", "LSB_MCPU_HOSTS"
_PBS_JOB, _PBS_NODEFILE = "PBS_JOBID", "PBS_NODEFILE"


def pbs_job(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the job and the variable it was read from, or None outside of PBS."""
    return (environ[_PBS_JOB], _PBS_JOB) if environ.get(_PBS_JOB) else None


def pbs_allocations(environ: Mapping[str, str]) -> list[Allocation]:
    """Return the nodes of the job, or an empty list if the file cannot be read.

    Some sites have the file on the first node only.
    """
    allocation = from_lines(_words_of_file(environ, _PBS_NODEFILE), _PBS_NODEFILE)
    return [allocation] if allocation else []


def lsf_job(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the job and the variables it was read from, or None outside of LSF."""
    name, index = environ.get(LSF_JOB), environ.get("LSB_JOBINDEX", "0")
    if not name:
        return None
    return (name, LSF_JOB) if index in ("", "0") else (f"{name}[{index}]", f"{LSF_JOB}, LSB_JOBINDEX")


def lsf_allocations(environ: Mapping[str, str]) -> list[Allocation]:
    """Return the nodes of the job; under jsrun without the launch node, which is first and has no rank."""
    allocation = _lsf_allocation(environ)
    if allocation is None:
        return []
    slots = allocation.slots or ()
    if environ.get(JSRUN.rank[0]) and len(slots) > 1 and slots[0] == 1 and min(slots[1:]) > 1:
        allocation = Allocation(allocation.nodes[1:], allocation.variable, slots[1:])
    return [allocation]


def _lsf_allocation(environ: Mapping[str, str]) -> Allocation | None:
    pairs = parsed(environ, _LSF_HOSTS, _hosts_and_slots)
    if pairs:
        return Allocation(tuple(pairs), _LSF_HOSTS, tuple(pairs.values()))
    allocation = from_lines(_words_of_file(environ, "LSB_DJOB_HOSTFILE"), "LSB_DJOB_HOSTFILE")
    return allocation or from_lines(environ.get("LSB_HOSTS", "").split(), "LSB_HOSTS")


def _words_of_file(environ: Mapping[str, str], name: str) -> list[str]:
    try:
        return Path(environ.get(name, "")).read_text("utf-8").split()
    except (OSError, ValueError):  # not set, not on this node, or not text
        return []


def _hosts_and_slots(text: str) -> dict[str, int]:
    words = text.split()
    if len(words) % 2 or not all(map(str.isdecimal, words[1::2])):
        raise ValueError(f"{text!r} is not a list of hosts and their slots such as 'a 4 b 4'")
    slots_of: dict[str, int] = {}
    for host, slots in zip(words[::2], words[1::2], strict=True):
        slots_of[host] = slots_of.get(host, 0) + int(slots)
    return slots_of


class Launched(NamedTuple):
    """Facts that a launcher gave to this rank. It leaves the others at None."""

    launcher: str  # name of the launcher
    rank: int
    size: int | None
    # index of this rank on its node, and number of ranks there
    local_rank: int | None
    local_size: int | None
    node: int | None  # number of this rank's node
    host: str | None  # name of this rank's node
    sources: Mapping[str, str]  # variable that each fact was read from
    # whether only this launcher sets these variables, and no scheduler's own launcher does
    alone: bool = False


def launched(environ: Mapping[str, str]) -> Launched | None:
    """Return the facts from the launcher of an MPI program, or None if no launcher started this process.

    Raise ValueError if the value of a variable is not a number.
    """
    return next(filter(None, (launched_by(environ, launcher) for launcher in MPIRUN)), None)


def launched_by(environ: Mapping[str, str], launcher: LauncherVariables) -> Launched | None:
    """Return the facts from this launcher, or None if it did not start this rank."""
    rank, variable = first_of(environ, launcher.rank)
    if rank is None:
        return None
    sources = {"launcher": variable, "rank": variable}
    numbers: dict[str, int | None] = {}
    for fact in ("size", "local_rank", "local_size", "node"):
        numbers[fact], variable = first_of(environ, getattr(launcher, fact))
        sources[fact] = variable
    host = next((name for name in launcher.host if environ.get(name)), None)
    sources["host"] = host or ""
    return Launched(
        launcher.name, rank, host=environ[host] if host else None, sources=sources, alone=launcher.alone, **numbers
    )


def by_jsrun(environ: Mapping[str, str]) -> Launched | None:
    """Return the facts from jsrun, or None for a rank that another launcher started.

    jsrun also sets the variables of Open MPI. If these have other values, an mpirun inside jsrun started the rank.
    """
    step, inner = launched_by(environ, JSRUN), launched(environ)
    if step is None or inner is None:
        return step
    return step if inner.rank == step.rank and inner.size in (None, step.size) else None


class LaunchedClusterResolver(ClusterResolver):
    """The ranks that a launcher started. Jobs take consecutive ranks; without jobs, all ranks are workers.

    The first rank of a node has the port ``port_base``, and the next one the next. ``rpc_layer`` is the protocol of the
    addresses that `master` returns. ``jobs`` has the number of tasks of each job; by default the environment's, see
    `requested_jobs`. The job ``spread`` has the last rank of each node. ``environ`` is ``os.environ`` by default.
    ``roles`` has the rank of each task.
    """

    def __init__(
        self,
        placement: Placement,
        port_base: int = 8888,
        rpc_layer: str | None = "grpc",
        jobs: Mapping[str, int] | None = None,
        spread: str | None = None,
        environ: Mapping[str, str] | None = None,
    ):
        mpi.end_job_on_error()
        environ = os.environ if environ is None else environ
        self._placement = placement
        self._port_base = port_base
        self.rpc_layer = rpc_layer
        counts, source = requested_jobs(jobs, environ)
        counts = {WORKER: placement.size} if counts is None else counts
        self.roles: Roles = dealt(counts, placement.size, spread, placement.ranks_by_node, source)
        self.task_type, self.task_id = checked_task(self.roles, placement.rank, environ)

    def tasks(self) -> dict[str, tuple[int, ...]]:
        """Return the task numbers of each job."""
        return self.roles.tasks()

    @property
    def placement(self) -> Placement:
        """Place of this rank among those that the launcher started, with the source of each fact."""
        return self._placement

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all ranks. Raise RuntimeError if the environment does not tell the node of each."""
        addresses = self.placement.addresses(self._port_base)
        if addresses is None:
            raise RuntimeError(
                f"the environment does not tell which rank is on which node (launcher: "
                f"{self.placement.launcher}; this rank's node: {self.placement.host or 'not named'}). "
                "MpiClusterResolver(comm) asks MPI"
            )
        return self.roles.cluster(addresses)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the number of GPUs of this rank; the arguments exist for tf.distribute and are ignored."""
        number = self.placement.gpus_per_rank
        if number is None:
            seen = super().num_accelerators().get("GPU", 0)
            # The ranks of a node divide the GPUs that all of them see; more ranks than GPUs share them.
            number = min(seen, max(1, seen // (self.placement.local_size or 1)))
        return {"GPU": number} if number else {}


def placement_of_rank(
    environ: Mapping[str, str],
    started: Launched,
    allocations: Sequence[Allocation],
    *,
    here: bool,
    job: tuple[str, str] | None = None,
) -> Placement:
    """Return the placement of a rank, from its launcher's variables and the nodes that a scheduler gave to the job.

    ``allocations`` are the nodes on which the ranks may be, the most reliable list first. ``here`` tells whether this
    process is the rank, so that the name of this machine is the rank's node. ``job`` is the name of the job, and the
    variables that it was read from. Raise RuntimeError if the launcher's variables do not tell the number of ranks, or
    tell fewer than this rank's number.
    """
    if started.size is None:
        raise RuntimeError(
            f"{started.launcher} tells the number of this rank ({started.sources['rank']}={started.rank}), but no "
            "variable says how many ranks there are. `resolve()` also reads the scheduler's variables, and "
            "MpiClusterResolver(comm) asks MPI"
        )
    if started.rank >= started.size:
        raise RuntimeError(
            f"{started.sources['rank']}={started.rank}, but {started.sources['size']}={started.size}: they describe "
            "different launches; start the program from a fresh shell"
        )
    host, of_host = _host(environ, started, allocations, here)
    placement = Placement(
        started.launcher,
        started.size,
        started.rank,
        host=host,
        local_rank=started.local_rank,
        local_size=started.local_size,
        sources={**started.sources, "host": of_host},
    )
    if started.size in (1, started.local_size):
        placement = _on_one_node(placement, allocations)
    else:
        placement = next(filter(None, (_on_nodes(placement, started, nodes) for nodes in allocations)), placement)
    if allocations:
        placement = with_facts(placement, allocations[-1].variable, allocation=allocations[-1].nodes)
    if job is not None:
        placement = with_facts(placement, job[1], job=job[0])
    # All ranks of a node see the GPUs that their launcher's daemon sees.
    return gpus.with_gpus(placement, environ, None)


def _host(
    environ: Mapping[str, str], started: Launched, allocations: Sequence[Allocation], here: bool
) -> tuple[str | None, str]:
    if started.host:
        return started.host, started.sources["host"]
    if here and any(position_of(own_host(), allocation.nodes) is not None for allocation in allocations):
        return own_host(), "the name of this machine"
    if environ.get("SLURMD_NODENAME") and not _is_inherited(environ, started):
        return environ["SLURMD_NODENAME"], "SLURMD_NODENAME"
    return (own_host(), "the name of this machine") if here else (None, "")


def _is_inherited(environ: Mapping[str, str], started: Launched) -> bool:
    """Return whether ``SLURMD_NODENAME`` may name the node where the launcher was called, not the rank's.

    Launchers that start ranks by ssh, or from brokers, pass on their own environment: a batch script's, or a shell's in
    a step of one node. If srun starts the launcher's proxies, the step has all nodes with ranks.
    """
    if started.launcher == FLUX.name:
        return True
    if started.launcher == OPEN_MPI.name or started.size is None or started.size <= (started.local_size or 1):
        return False
    step = parsed(environ, slurm_step.NODELIST, expand_hostlist) if environ.get("SLURM_STEP_ID") else None
    return len(step or ()) < 2


def _on_one_node(placement: Placement, allocations: Sequence[Allocation]) -> Placement:
    """Return the placement of this rank if all ranks are on its node."""
    host, size, why = placement.host, placement.size, "all ranks are on this node"
    nodes: tuple[str, ...] | None = None if host is None else (host,)
    of_nodes = why
    for allocation in allocations:
        index = 0 if host is None and len(allocation.nodes) == 1 else position_of(host, allocation.nodes)
        if index is not None:
            nodes, of_nodes = (allocation.nodes[index],), allocation.variable
            break
    if placement.local_rank is None:
        placement = with_facts(placement, why, local_rank=placement.rank, local_size=size)
    placement = with_facts(placement, why, node=0, ranks_per_node=(size,), node_of_rank=(0,) * size)
    placement = with_facts(placement, of_nodes, nodes=nodes)
    return replace(placement, host=nodes[0] if nodes else None, local_rank=placement.rank, local_size=size)


def _on_nodes(placement: Placement, started: Launched, allocation: Allocation) -> Placement | None:
    """Return the placement of this rank if the ranks are on these nodes, or None if known facts contradict it."""
    node = position_of(placement.host, allocation.nodes)
    if node is None:
        node = started.node
        if placement.host is not None and node is None:
            return None  # the host is known and not in this list, and the launcher does not number the nodes
    if node is not None and node >= len(allocation.nodes):
        return None
    divided = allocation.ranks_per_node(placement.size, placement.local_size, node)
    if divided is None:
        return None
    counts, of_counts = divided
    node_of_rank, why = _order(counts, placement.rank, node, placement.local_rank)
    if node is None and node_of_rank is not None:
        node = node_of_rank[placement.rank]
    local_rank, local_size = placement.local_rank, placement.local_size
    if node_of_rank is not None and node is not None:
        local_rank = ranks_on(node_of_rank, node).index(placement.rank) if local_rank is None else local_rank
        local_size = counts[node]
    sources = {
        **dict.fromkeys(("nodes", "node", "host"), allocation.variable),
        **dict.fromkeys(("node_of_rank", "local_rank", "local_size"), why),
        # Slots are what the scheduler expects: --map-by and similar options may spread the ranks in another way.
        "ranks_per_node": f"assumed: {of_counts}",
        **{name: source for name, source in placement.sources.items() if source},
    }
    return replace(
        placement,
        nodes=allocation.nodes,
        node=node,
        host=placement.host if node is None else allocation.nodes[node],
        local_rank=local_rank,
        local_size=local_size,
        ranks_per_node=counts,
        node_of_rank=node_of_rank,
        sources=sources,
    )


def _order(
    counts: tuple[int, ...], rank: int, node: int | None, local_rank: int | None
) -> tuple[tuple[int, ...] | None, str]:
    """Return the node of each rank. Launchers fill nodes one after the other by default."""
    orders = (
        (block(counts), "assumed: node after node is filled"),
        (plane(counts, 1), "assumed: each node in turn gets one rank"),
    )
    for node_of_rank, why in orders:
        index = local_rank_of(node_of_rank, rank)
        if node in (None, node_of_rank[rank]) and local_rank in (None, index):
            return tuple(node_of_rank), why
    return None, ""


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
# For each scheduler, the functions that read the name of a job and its nodes.
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
            placement = _placement_by_mpi(comm, environ)
        else:
            allocations, job = allocations_of(environ)
            started = by_jsrun(environ) or launched(environ) or ALONE
            placement = placement_of_rank(environ, started, allocations, here=here, job=job)
        super().__init__(placement, port_base, rpc_layer, jobs, spread, environ)


def allocations_of(environ: Mapping[str, str]) -> tuple[list[Allocation], tuple[str, str] | None]:
    """Return the nodes of the job and its name, from the variables of its scheduler."""
    for job_of, nodes_of in _SCHEDULERS:
        job, allocations = job_of(environ), nodes_of(environ)
        if job is not None or allocations:
            return allocations, job
    return [], None


def _placement_by_mpi(comm: Any, environ: Mapping[str, str]) -> Placement:
    """Return the placement of this rank as MPI knows it. Collective."""
    from mpistrat.runtime.topology import Topology

    topology = Topology.of(comm)
    names = topology.all_gather_object(own_host())
    known = placement_in(topology)
    assert known.node is not None
    # Shared memory decides which ranks are on one node: host names only label the nodes.
    nodes = tuple(names[ranks[0]] for ranks in topology.nodes)
    on_node = slurm_step.gpus_on_node(environ, known.rank, known.size, known.local_size)
    known = gpus.with_gpus(with_facts(known, "MPI", nodes=nodes, host=nodes[known.node]), environ, on_node)
    _, job = allocations_of(environ)
    return known if job is None else with_facts(known, job[1], job=job[0])


def placement_in(topology: Topology) -> Placement:
    """Return the placement of this rank as MPI knows it, without node names and without communication."""
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
