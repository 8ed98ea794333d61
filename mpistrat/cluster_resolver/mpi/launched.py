"""Resolvers that read the ranks from a launcher's variables and the nodes from a scheduler's, and these variables.

PBS has a file with one line for each expected rank, and LSF the nodes and their slots, ``LSB_MCPU_HOSTS="a 4 b 4"``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mpistrat.cluster_resolver import gpus, layout
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.layout import Allocation, from_lines
from mpistrat.cluster_resolver.placement import Placement, with_facts
from mpistrat.cluster_resolver.resolver import ClusterResolver
from mpistrat.cluster_resolver.roles import WORKER, Roles, dealt, jobs_told, same_task
from mpistrat.cluster_resolver.slurm import step as slurm_step
from mpistrat.cluster_resolver.variables import first_of, own_host, position_of
from mpistrat.launch.hostlist import expand_hostlist, parsed
from mpistrat.launch.launchers import FLUX, JSRUN, MPIRUN, OPEN_MPI, LauncherVariables
from mpistrat.process import mpi

LSF_JOB, _LSF_HOSTS = "LSB_JOBID", "LSB_MCPU_HOSTS"
_PBS_JOB, _PBS_NODEFILE = "PBS_JOBID", "PBS_NODEFILE"


def pbs_job(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the job and the variable it was read from, or None outside of PBS."""
    return (environ[_PBS_JOB], _PBS_JOB) if environ.get(_PBS_JOB) else None


def pbs_allocations(environ: Mapping[str, str]) -> list[Allocation]:
    """Return the nodes of the job, or an empty list if the file cannot be read.

    Some sites have the file on the first node only.
    """
    found = from_lines(_words_of_file(environ, _PBS_NODEFILE), _PBS_NODEFILE)
    return [found] if found else []


def lsf_job(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the job and the variables it was read from, or None outside of LSF."""
    name, index = environ.get(LSF_JOB), environ.get("LSB_JOBINDEX", "0")
    if not name:
        return None
    return (name, LSF_JOB) if index in ("", "0") else (f"{name}[{index}]", f"{LSF_JOB}, LSB_JOBINDEX")


def lsf_allocations(environ: Mapping[str, str]) -> list[Allocation]:
    """Return the nodes of the job; under jsrun without the launch node, which is first and has no rank."""
    found = _lsf_allocation(environ)
    if found is None:
        return []
    slots = found.slots or ()
    if environ.get(JSRUN.rank[0]) and len(slots) > 1 and slots[0] == 1 and min(slots[1:]) > 1:
        found = Allocation(found.nodes[1:], found.variable, slots[1:])
    return [found]


def _lsf_allocation(environ: Mapping[str, str]) -> Allocation | None:
    pairs = parsed(environ, _LSF_HOSTS, _hosts_and_slots)
    if pairs:
        return Allocation(tuple(pairs), _LSF_HOSTS, tuple(pairs.values()))
    found = from_lines(_words_of_file(environ, "LSB_DJOB_HOSTFILE"), "LSB_DJOB_HOSTFILE")
    return found or from_lines(environ.get("LSB_HOSTS", "").split(), "LSB_HOSTS")


def _words_of_file(environ: Mapping[str, str], name: str) -> list[str]:
    try:
        return Path(environ.get(name, "")).read_text().split()
    except (OSError, ValueError):  # not set, not on this node, or not text
        return []


def _hosts_and_slots(text: str) -> dict[str, int]:
    words = text.split()
    if len(words) % 2 or not all(map(str.isdecimal, words[1::2])):
        raise ValueError(f"{text!r} is not a list of hosts and their slots such as 'a 4 b 4'")
    found: dict[str, int] = {}
    for host, slots in zip(words[::2], words[1::2], strict=True):
        found[host] = found.get(host, 0) + int(slots)
    return found


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
    return next(filter(None, (told(environ, each) for each in MPIRUN)), None)


def told(environ: Mapping[str, str], launcher: LauncherVariables) -> Launched | None:
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
    """Return the facts from jsrun, or None for a rank that mpirun or no jsrun started.

    jsrun also sets the variables of Open MPI. If these have other values, an mpirun inside jsrun started the rank.
    """
    step, inner = told(environ, JSRUN), launched(environ)
    if step is None or inner is None:
        return step
    return step if inner.rank == step.rank and inner.size in (None, step.size) else None


class LaunchedClusterResolver(ClusterResolver):
    """The ranks that a launcher started. Jobs take consecutive ranks; without jobs, all ranks are workers.

    The first rank of a node has the port ``port_base``, and the next one the next. ``rpc_layer`` is the protocol of the
    addresses that `master` returns. ``jobs`` has the number of tasks of each job; by default what the environment
    tells, see `jobs_told`. The job ``spread`` has the last rank of each node. ``environ`` is ``os.environ`` by default.
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
        told, source = jobs_told(jobs, environ)
        told = {WORKER: placement.size} if told is None else told
        self.roles: Roles = dealt(told, placement.size, spread, placement.ranks_by_node, source)
        self.task_type, self.task_id = same_task(self.roles, placement.rank, environ)

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
        """Return the number of GPUs of this rank; the arguments, those of tf.distribute, are ignored."""
        number = self.placement.gpus_per_rank
        if number is None:
            seen = super().num_accelerators().get("GPU", 0)
            number = min(seen, max(1, seen // (self.placement.local_size or 1)))
        return {"GPU": number} if number else {}


def place(
    environ: Mapping[str, str],
    told: Launched,
    allocations: Sequence[Allocation],
    *,
    here: bool,
    job: tuple[str, str] | None = None,
) -> Placement:
    """Return the place of a rank, from its launcher's variables and the nodes that a scheduler gave to the job.

    ``allocations`` are the nodes on which the ranks may be, the most reliable list first. ``here`` tells whether this
    process is the rank, so that the name of this machine is the rank's node. ``job`` is the name of the job, and the
    variables that it was read from. Raise RuntimeError if the launcher's variables do not tell the number of ranks, or
    tell fewer than this rank's number.
    """
    if told.size is None:
        raise RuntimeError(
            f"{told.launcher} tells the number of this rank ({told.sources['rank']}={told.rank}), but no variable says "
            "how many ranks there are. `resolve()` also reads the scheduler's variables, and MpiClusterResolver(comm) "
            "asks MPI"
        )
    if told.rank >= told.size:
        raise RuntimeError(
            f"{told.sources['rank']}={told.rank}, but {told.sources['size']}={told.size}: they describe "
            "different launches; start the program from a fresh shell"
        )
    host, of_host = _host(environ, told, allocations, here)
    placement = Placement(
        told.launcher,
        told.size,
        told.rank,
        host=host,
        local_rank=told.local_rank,
        local_size=told.local_size,
        sources={**told.sources, "host": of_host},
    )
    if told.size in (1, told.local_size):
        placement = _on_one_node(placement, allocations)
    else:
        placement = next(filter(None, (_on_nodes(placement, told, each) for each in allocations)), placement)
    if allocations:
        placement = with_facts(placement, allocations[-1].variable, allocation=allocations[-1].nodes)
    if job is not None:
        placement = with_facts(placement, job[1], job=job[0])
    # All ranks of a node see the GPUs that their launcher's daemon sees.
    return gpus.with_gpus(placement, environ, None)


def _host(
    environ: Mapping[str, str], told: Launched, allocations: Sequence[Allocation], here: bool
) -> tuple[str | None, str]:
    if told.host:
        return told.host, told.sources["host"]
    if here and any(position_of(own_host(), each.nodes) is not None for each in allocations):
        return own_host(), "the name of this machine"
    if environ.get("SLURMD_NODENAME") and not _handed_on(environ, told):
        return environ["SLURMD_NODENAME"], "SLURMD_NODENAME"
    return (own_host(), "the name of this machine") if here else (None, "")


def _handed_on(environ: Mapping[str, str], told: Launched) -> bool:
    """Return whether ``SLURMD_NODENAME`` may name the node where the launcher was called, not the rank's.

    Launchers that start ranks by ssh, or from brokers, pass on their own environment: that of a batch script, or of a
    shell in a step of one node. If srun starts the launcher's proxies, the step has all nodes with ranks.
    """
    if told.launcher == FLUX.name:
        return True
    if told.launcher == OPEN_MPI.name or told.size is None or told.size <= (told.local_size or 1):
        return False
    step = parsed(environ, slurm_step.NODELIST, expand_hostlist) if environ.get("SLURM_STEP_ID") else None
    return len(step or ()) < 2


def _on_one_node(placement: Placement, allocations: Sequence[Allocation]) -> Placement:
    """Return the place of this rank if all ranks are on its node."""
    host, size, why = placement.host, placement.size, "all ranks are on this node"
    nodes: tuple[str, ...] | None = None if host is None else (host,)
    of_nodes = why
    for allocation in allocations:
        own = 0 if host is None and len(allocation.nodes) == 1 else position_of(host, allocation.nodes)
        if own is not None:
            nodes, of_nodes = (allocation.nodes[own],), allocation.variable
            break
    if placement.local_rank is None:
        placement = with_facts(placement, why, local_rank=placement.rank, local_size=size)
    placement = with_facts(placement, why, node=0, ranks_per_node=(size,), node_of_rank=(0,) * size)
    placement = with_facts(placement, of_nodes, nodes=nodes)
    return replace(placement, host=nodes[0] if nodes else None, local_rank=placement.rank, local_size=size)


def _on_nodes(placement: Placement, told: Launched, allocation: Allocation) -> Placement | None:
    """Return the place of this rank if the ranks are on these nodes, or None if known facts contradict it."""
    own = position_of(placement.host, allocation.nodes)
    if own is None:
        own = told.node
        if placement.host is not None and own is None:
            return None
    if own is not None and own >= len(allocation.nodes):
        return None
    divided = allocation.ranks_per_node(placement.size, placement.local_size, own)
    if divided is None:
        return None
    counts, of_counts = divided
    where, why = _order(counts, placement.rank, own, placement.local_rank)
    if own is None and where is not None:
        own = where[placement.rank]
    local_rank, local_size = placement.local_rank, placement.local_size
    if where is not None and own is not None:
        local_rank = layout.ranks_on(where, own).index(placement.rank) if local_rank is None else local_rank
        local_size = counts[own]
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
        node=own,
        host=placement.host if own is None else allocation.nodes[own],
        local_rank=local_rank,
        local_size=local_size,
        ranks_per_node=counts,
        node_of_rank=where,
        sources=sources,
    )


def _order(
    counts: tuple[int, ...], rank: int, node: int | None, local_rank: int | None
) -> tuple[tuple[int, ...] | None, str]:
    """Return the node of each rank. Launchers fill nodes one after the other by default."""
    orders = (
        (layout.block(counts), "assumed: node after node is filled"),
        (layout.plane(counts, 1), "assumed: each node in turn gets one rank"),
    )
    for where, why in orders:
        index = layout.local_rank(where, rank)
        if node in (None, where[rank]) and local_rank in (None, index):
            return tuple(where), why
    return None, ""
