"""The placement of this rank in its job, and the nodes and variables from which it is read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.representation import grouped

_MOST_DIGITS = 18


def required(environ: Mapping[str, str], name: str, hint: str) -> str:
    """Return the value of a variable that must be set.

    Raise RuntimeError if the variable is not set, or empty. The message ends in ``hint``: which program sets it.
    """
    value = environ.get(name, "")
    if not value:
        raise RuntimeError(f"the environment variable {name} is {'empty' if name in environ else 'not set'}: {hint}")
    return value


def integer(environ: Mapping[str, str], name: str) -> int | None:
    """Return the value of a variable as a number, or None if it is not set or empty.

    Raise ValueError if the value is not a number from 0 on, or has more than 18 digits.
    """
    value = environ.get(name, "")
    if not value:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS):
        raise ValueError(f"the environment variable {name} must be a number from 0 on, not {value!r:.60}")
    return int(value)


def first_of(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[int | None, str]:
    """Return the number in the first variable that is set, and its name; ``(None, "")`` without one.

    Raise ValueError if the value is not a number from 0 on.
    """
    for name in names:
        value = integer(environ, name)
        if value is not None:
            return value, name
    return None, ""


def own_host() -> str:
    """Return the name of this machine."""
    return os.uname().nodename


def position_of(host: str | None, nodes: tuple[str, ...]) -> int | None:
    """Return the index of the node with this name, in full or up to the first dot, or None without one.

    >>> position_of("b.cluster.org", ("a", "b"))
    1
    """
    if host is None:
        return None
    if host in nodes:
        return nodes.index(host)
    short = [node.partition(".")[0] for node in nodes]
    name = host.partition(".")[0]
    return short.index(name) if short.count(name) == 1 else None


@dataclass(frozen=True)
class Allocation:
    """The nodes that a job may use."""

    nodes: tuple[str, ...]  # names of the nodes, in the scheduler's order
    variable: str  # variable that the nodes were read from
    # number of ranks that the scheduler expects on each node; None if it does not say
    slots: tuple[int, ...] | None = None
    slots_variable: str = ""  # variable that the slots were read from; empty if it is ``variable``
    all_used: bool = False  # whether every node is known to have ranks

    def ranks_per_node(self, size: int, local_size: int | None, node: int | None) -> tuple[tuple[int, ...], str] | None:
        """Return the number of ranks on each node and its source, or None if the variables do not tell.

        There are ``size`` ranks, of which ``local_size`` are on the node of the index ``node``.

        >>> Allocation(("a", "b", "c"), "PBS_NODEFILE", slots=(3, 1, 1)).ranks_per_node(5, 1, 2)
        ((3, 1, 1), 'PBS_NODEFILE')
        >>> Allocation(("a", "b", "c"), "SLURM_JOB_NODELIST").ranks_per_node(6, 2, 0)
        ((2, 2, 2), 'SLURM_JOB_NODELIST, evenly')
        >>> Allocation(("a", "b", "c"), "SLURM_JOB_NODELIST").ranks_per_node(4, 2, 0)  # two nodes or three?
        """
        for counts, why in self._candidates(size, local_size):
            known = local_size is not None and node is not None
            if sum(counts) == size and all(counts) and not (known and counts[node or 0] != local_size):
                return counts, why
        return None

    def _candidates(self, size: int, local_size: int | None) -> list[tuple[tuple[int, ...], str]]:
        candidates = []
        if self.slots is not None:
            variable = self.slots_variable or self.variable
            candidates.append((self.slots, variable))
            if self.all_used:
                candidates.append((_filled(self.slots, size), variable))
        if local_size is not None and (self.slots is None or len(set(self.slots)) == 1):
            candidates.append(((local_size,) * len(self.nodes), f"{self.variable}, evenly"))
        return candidates


def from_lines(hosts: list[str], variable: str) -> Allocation | None:
    """Return the allocation of a list that names each node once per slot, or None if the list is empty."""
    counts = Counter(hosts)
    return Allocation(tuple(counts), variable, tuple(counts.values())) if counts else None


def _filled(slots: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the number of ranks on each node if nodes are filled one after the other."""
    counts = []
    for slot in slots:
        counts.append(min(slot, size))
        size -= counts[-1]
    return tuple(counts)


def block(counts: Sequence[int]) -> list[int]:
    """Return the node of each rank if nodes are filled one after the other.

    >>> block([3, 1, 1])
    [0, 0, 0, 1, 2]
    """
    return [node for node, count in enumerate(counts) for _ in range(count)]


def plane(counts: Sequence[int], size: int) -> list[int]:
    """Return the node of each rank if nodes that have room get ``size`` ranks in turn.

    >>> plane([3, 1], 2)
    [0, 0, 1, 0]
    """
    left = list(counts)
    nodes: list[int] = []
    while any(left):
        for node, room in enumerate(left):
            taken = min(room, size)
            nodes += [node] * taken
            left[node] -= taken
    return nodes


def ranks_on(node_of_rank: Sequence[int], node: int) -> list[int]:
    """Return the ranks of a node.

    >>> ranks_on([0, 1, 2, 0, 0], 0)
    [0, 3, 4]
    """
    return [rank for rank, other in enumerate(node_of_rank) if other == node]


def local_rank_of(node_of_rank: Sequence[int], rank: int) -> int:
    """Return the index of a rank on its node."""
    return ranks_on(node_of_rank, node_of_rank[rank]).index(rank)


class Fact(NamedTuple):
    """A known fact about the job.

    Attributes
    ----------
    name : str
        Attribute of `Placement` that holds the fact.
    value : object
        Value of the fact.
    source : str
        Variables that the fact was read from, or how it follows from other facts.

    Examples
    --------
    >>> [fact.name for fact in Placement("mpirun", 2, 1, host="n1").facts()]
    ['launcher', 'size', 'rank', 'host']
    """

    name: str
    value: Any
    source: str


@dataclass(frozen=True)
class Placement:
    """The place of this rank among the ranks of its job. The environment leaves unknown facts at None.

    Attributes
    ----------
    launcher : str
        Program that started the ranks.
    size, rank : int
        Number of ranks, and number of this rank.
    nodes : tuple of str or None
        Names of the nodes that have ranks, in the launcher's order.
    node : int or None
        Index in ``nodes`` of this rank's node.
    host : str or None
        Name of this rank's node.
    local_rank, local_size : int or None
        Index of this rank on its node, and number of ranks there.
    ranks_per_node : tuple of int or None
        Number of ranks of each node.
    node_of_rank : tuple of int or None
        Index in ``nodes`` of the node of each rank.
    allocation : tuple of str or None
        Nodes of the whole job; some may have no rank of this program.
    gpus : tuple of str or None
        GPUs that this process sees, as ``CUDA_VISIBLE_DEVICES`` names them.
    gpu : str or None
        This rank's GPU, one of ``gpus``.
    device : str or None
        This rank's device in this process, such as ``"cuda:0"``; ``"cpu:0"`` if it sees no GPU.
    gpus_per_rank : int or None
        Number of GPUs that are for this rank.
    job : str or None
        Name of the job for its scheduler; ``12_3`` is task 3 of the array 12.
    sources : mapping
        Source of each fact, see `Fact`.

    Examples
    --------
    >>> where = Placement("srun", size=3, rank=2, nodes=("n1", "n2"), node_of_rank=(0, 0, 1), node=1)
    >>> where.num_nodes, where.ranks_by_node, where.local_rank
    (2, ((0, 1), (2,)), None)
    """

    launcher: str
    size: int
    rank: int
    nodes: tuple[str, ...] | None = None
    node: int | None = None
    host: str | None = None
    local_rank: int | None = None
    local_size: int | None = None
    ranks_per_node: tuple[int, ...] | None = None
    node_of_rank: tuple[int, ...] | None = None
    allocation: tuple[str, ...] | None = None
    gpus: tuple[str, ...] | None = None
    gpu: str | None = None
    device: str | None = None
    gpus_per_rank: int | None = None
    job: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def num_nodes(self) -> int | None:
        """Number of nodes that have ranks; None if unknown."""
        known = self.ranks_per_node or self.nodes
        return None if known is None else len(known)

    @property
    def ranks_by_node(self) -> tuple[tuple[int, ...], ...] | None:
        """Ranks of each node, in the order of the nodes' first ranks; the scheduler's order may differ.

        Examples
        --------
        >>> Placement("srun", 3, 0, node_of_rank=(1, 0, 1)).ranks_by_node
        ((0, 2), (1,))
        """
        if self.node_of_rank is None:
            return None
        by_node = grouped((node, rank) for rank, node in enumerate(self.node_of_rank))
        return tuple(map(tuple, by_node.values()))

    def facts(self) -> tuple[Fact, ...]:
        """Return all known facts, with their sources.

        Examples
        --------
        >>> Placement("srun", 4, 3, sources={"size": "SLURM_STEP_NUM_TASKS"}).facts()[1]
        Fact(name='size', value=4, source='SLURM_STEP_NUM_TASKS')
        """
        values = ((item.name, getattr(self, item.name)) for item in fields(self) if item.name != "sources")
        return tuple(Fact(name, value, self.sources.get(name, "")) for name, value in values if value is not None)

    def addresses(self, port_base: int) -> list[str] | None:
        """Return an address ``host:port`` for each rank, with ports from ``port_base`` on each node.

        Return None if the nodes of the ranks are unknown.

        Raises
        ------
        ValueError
            If a port is outside 1 to 65535.
        """
        if self.node_of_rank is None or self.nodes is None:
            return None
        last = max(Counter(self.node_of_rank).values()) - 1
        if not isinstance(port_base, int) or not 1 <= port_base <= _LAST_PORT - last:
            raise ValueError(
                f"port_base is a number from 1 to {_LAST_PORT - last}, as a node has {last + 1} ranks, each with "
                f"a port of its own; it is {port_base!r}"
            )
        taken = [0] * len(self.nodes)
        addresses = []
        for node in self.node_of_rank:
            addresses.append(f"{self.nodes[node]}:{port_base + taken[node]}")
            taken[node] += 1
        return addresses

    def __str__(self) -> str:
        lines = [(fact.name, _text(fact.value), fact.source) for fact in self.facts()]
        widths = [max(len(line[column]) for line in lines) for column in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in lines)


def with_facts(placement: Placement, source: str, **facts: Any) -> Placement:
    """Return a placement with other facts, and their source."""
    return replace(placement, **facts, sources={**placement.sources, **dict.fromkeys(facts, source)})


_LAST_PORT = 2**16 - 1

# Sources of facts that a user wrote down, in place of a launcher.
GIVEN = "the cluster specification"
EMPTY = "the cluster specification is empty"


def training_tasks(cluster: ClusterSpec, task_type: str | None = None) -> list[tuple[str, int]]:
    """Return the tasks that train together, in the order of ranks; for an evaluator, the evaluators.

    >>> training_tasks(ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"], "chief": ["a:0"]}))
    [('chief', 0), ('worker', 0), ('worker', 1)]
    """
    jobs = ("evaluator",) if task_type == "evaluator" else ("chief", "worker")
    return [(job, index) for job in jobs if job in cluster.jobs for index in cluster.task_indices(job)]


def placement_of_task(cluster: ClusterSpec, task_type: str | None, task_id: int | None) -> Placement:
    """Return the placement of a task in the tasks that train together: the chief first, then the workers.

    Raise ValueError if the task is not given, is not in the cluster, or does not train (a parameter server).

    >>> placement_of_task(ClusterSpec({"worker": ["a:1", "b:1"], "chief": ["a:0"]}), "worker", 1).rank
    2
    """
    if not cluster:
        return Placement(GIVEN, 1, 0, sources={"size": EMPTY})
    if task_type is None or task_id is None:
        raise ValueError(
            f"the cluster has tasks of {cluster.jobs}, but the task of this process is not known: "
            f"task_type is {task_type!r}, task_id is {task_id!r}; give both"
        )
    tasks = training_tasks(cluster, task_type)
    address = cluster.task_address(task_type, task_id)
    if (task_type, task_id) not in tasks:
        jobs = sorted({job for job, _ in tasks})
        raise ValueError(f"task {task_id} of job {task_type!r} ({address}) does not train: only {jobs} do")
    if task_type == "evaluator":  # a cluster of its own
        tasks = [(task_type, task_id)]
    rank = tasks.index((task_type, task_id))
    # Tasks whose addresses have the same host are on one node, and differ in their ports.
    hosts = [cluster.task_address(*task).rpartition(":")[0] for task in tasks]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    counted = Counter(hosts)
    counts = tuple(counted[host] for host in numbers)
    node = numbers[hosts[rank]]
    facts: dict[str, Any] = {
        "size": len(tasks),
        "rank": rank,
        "nodes": tuple(numbers),
        "node": node,
        "host": hosts[rank],
        "local_rank": hosts[:rank].count(hosts[rank]),
        "local_size": counts[node],
        "ranks_per_node": counts,
        "node_of_rank": tuple(numbers[host] for host in hosts),
    }
    return Placement(GIVEN, **facts, sources=dict.fromkeys(facts, GIVEN))


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
