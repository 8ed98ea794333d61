"""The place of this rank among the ranks of its job, and the variables that tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec


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
        by_node: dict[int, list[int]] = {}
        for rank, node in enumerate(self.node_of_rank):
            by_node.setdefault(node, []).append(rank)
        return tuple(map(tuple, by_node.values()))

    def facts(self) -> tuple[Fact, ...]:
        """Return all known facts, with their sources.

        Examples
        --------
        >>> Placement("srun", 4, 3, sources={"size": "SLURM_STEP_NUM_TASKS"}).facts()[1]
        Fact(name='size', value=4, source='SLURM_STEP_NUM_TASKS')
        """
        found = ((each.name, getattr(self, each.name)) for each in fields(self) if each.name != "sources")
        return tuple(Fact(name, value, self.sources.get(name, "")) for name, value in found if value is not None)

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
    """Return the place of a task among those that train together: the chief first, then the workers.

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
