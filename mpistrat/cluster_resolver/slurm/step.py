"""The facts that Slurm gives to a task about its step: tasks, nodes, and the node of each task.

Inside a step only ``SLURM_STEP_*`` and the variables of the task itself describe the step. ``SLURM_NODELIST``,
``SLURM_JOB_*`` and ``SLURM_NTASKS_PER_NODE`` describe the job, even if the step is smaller; so does
``SLURM_NNODES`` in a batch script. In heterogeneous steps, ``SLURM_STEP_NODELIST`` and
``SLURM_STEP_TASKS_PER_NODE`` are sorted by name, while tasks and ``SLURM_NODEID`` follow the groups.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpistrat.cluster_resolver import gpus, layout
from mpistrat.cluster_resolver.layout import Allocation
from mpistrat.cluster_resolver.placement import Placement
from mpistrat.cluster_resolver.variables import integer, position_of, required
from mpistrat.launch.hostlist import expand_counts, expand_hostlist, parsed
from mpistrat.launch.launchers import SRUN
from mpistrat.launch.left_over_step import groups, left_over

_SRUN = "srun sets it for every task that it starts; is this program started by srun?"
NODELIST = "SLURM_STEP_NODELIST"
COUNTS = "SLURM_STEP_TASKS_PER_NODE"
(SIZE,), (RANK,), (_LOCAL_RANK,), (NODE,) = SRUN.size, SRUN.rank, SRUN.local_rank, SRUN.node
GROUPS = "SLURM_JOB_NODELIST_HET_GROUP_*"
JOB_COUNTS = "SLURM_TASKS_PER_NODE"
JOB_NODELIST = "SLURM_JOB_NODELIST"


def number(environ: Mapping[str, str], name: str) -> int:
    """Return the number in a variable that srun sets for every task.

    Raise RuntimeError if the environment does not tell.
    """
    required(environ, name, _SRUN)
    value = integer(environ, name)
    assert value is not None
    return value


def with_step(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return an environment with the variables of the step: those of its job if a batch script is its only task."""
    if any(environ.get(name) for name in (SIZE, COUNTS, NODELIST)) or environ.get("SLURM_HET_SIZE"):
        return environ
    if environ.get(JOB_COUNTS) != "1" or not environ.get(JOB_NODELIST) or environ.get(RANK) != "0":
        return environ
    return {**environ, SIZE: "1", COUNTS: "1", NODELIST: environ[JOB_NODELIST]}


def read(environ: Mapping[str, str], tasks_per_node: Mapping[str, int] | int | None = None) -> Placement:
    """Return the place of a task. ``tasks_per_node`` replaces the number of tasks of each node in the environment.

    Raise RuntimeError if the environment lacks a variable, or one contradicts another, and ValueError if a variable has
    a value that cannot be read.
    """
    rank = number(environ, RANK)
    why = left_over(environ) if tasks_per_node is None else None
    if why is not None:
        raise RuntimeError(
            f"the variables of the step are those of another job: {why}. sbatch was called inside that job and passed "
            "them on; start the tasks with srun, or submit from a fresh shell"
        )
    parts: list[list[str]] = []
    if isinstance(tasks_per_node, Mapping):
        nodes, counts = tuple(tasks_per_node), tuple(map(int, tasks_per_node.values()))
    else:
        required(environ, NODELIST, _SRUN)
        nodes = tuple(parsed(environ, NODELIST, expand_hostlist) or ())
        if tasks_per_node is None:
            required(environ, COUNTS, _SRUN)
            counts = tuple(parsed(environ, COUNTS, expand_counts) or ())
            parts = _groups_of_step(environ, nodes)
            nodes, counts = _in_order_of(parts, nodes, counts)
        else:
            counts = (int(tasks_per_node),) * len(nodes)
    if len(nodes) != len(counts):
        raise RuntimeError(
            f"{NODELIST}={environ[NODELIST]} names {len(nodes)} nodes, but "
            f"{COUNTS}={environ[COUNTS]} has {len(counts)} counts: they describe different steps"
        )
    said = COUNTS if tasks_per_node is None else "tasks_per_node"
    if rank >= sum(counts):
        raise RuntimeError(
            f"{RANK}={rank}, but the step has {sum(counts)} tasks according to {said}: was this program started "
            "by mpirun? Then `resolve()` finds the right variables"
        )
    sizes = [len(part) for part in parts] or [len(nodes)]
    where, why = _layout(environ, counts, sizes)
    # Components of a heterogeneous step may share a node: then ``nodes`` has it once per component.
    position = {host: place for place, host in enumerate(dict.fromkeys(nodes))}
    names, merged = tuple(position), [position[host] for host in nodes]
    totals = [0] * len(names)
    for place, count in zip(merged, counts, strict=True):
        totals[place] += count
    node = position_of(environ.get("SLURMD_NODENAME"), names)
    node_id = integer(environ, NODE)
    if node is None and node_id is not None and node_id < len(nodes):
        node = merged[node_id]
    gtids = environ.get("SLURM_GTIDS", "") if tasks_per_node is None else ""
    if where is not None and node is not None and gtids:
        here = [part for part, place in enumerate(merged) if place == node]
        expected = [",".join(map(str, layout.ranks_on(where, part))) for part in here]
        if gtids not in expected:
            tasks = " and ".join(expected)
            why = f"{why} would put tasks {tasks} on {names[node]}, but SLURM_GTIDS={gtids}"
            where = None
    if where is not None:
        where = [merged[part] for part in where]
        node = where[rank] if node is None else node
    elif len(names) == 1:
        where, why = [0] * sum(counts), "all tasks are on this node"
    local_rank, of_local_rank = integer(environ, _LOCAL_RANK), _LOCAL_RANK
    # SLURM_LOCALID counts the tasks of one component: wrong where components share a node.
    shared = node is not None and gtids and len(gtids.split(",")) < totals[node]
    if local_rank is None or shared or len(names) < len(nodes):
        local_rank = None if where is None else layout.local_rank(where, rank)
        of_local_rank = why
    of_nodes = f"{NODELIST}, {GROUPS}" if len(parts) > 1 else NODELIST
    return Placement(
        "srun",
        sum(totals),
        rank,
        nodes=names,
        node=node,
        host=None if node is None else names[node],
        local_rank=local_rank,
        local_size=None if node is None else totals[node],
        ranks_per_node=tuple(totals),
        node_of_rank=None if where is None else tuple(where),
        sources={
            "launcher": SIZE,
            "size": SIZE if environ.get(SIZE) else said,
            "rank": RANK,
            "nodes": said if isinstance(tasks_per_node, Mapping) else of_nodes,
            "ranks_per_node": said,
            "node_of_rank": why,
            "host": "SLURMD_NODENAME" if environ.get("SLURMD_NODENAME") else NODELIST,
            "node": NODE if environ.get(NODE) else why,
            "local_rank": of_local_rank,
            "local_size": said,
        },
    )


def gpus_on_node(environ: Mapping[str, str], rank: int, size: int, local_size: int | None) -> tuple[int, str] | None:
    """Return the number of the step's GPUs on this node and its source; None if ranks are not the step's tasks."""
    if environ.get(RANK) != str(rank) or environ.get(SIZE) != str(size):
        return None
    return gpus.on_node(environ, local_size)


def _groups_of_step(environ: Mapping[str, str], nodes: tuple[str, ...]) -> list[list[str]]:
    """Return the step's nodes by group; one group if the groups do not cover the step's nodes exactly."""
    there = set(nodes)
    parts = [[host for host in group if host in there] for group in groups(environ)]
    parts = [part for part in parts if part]
    if sorted(host for part in parts for host in part) != sorted(nodes):
        return [list(nodes)]
    return parts


def _in_order_of(
    parts: list[list[str]], nodes: tuple[str, ...], counts: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return nodes and counts in the order in which Slurm numbers the nodes."""
    if len(nodes) != len(counts) or len(parts) == 1:
        return nodes, counts
    counts_of: dict[str, list[int]] = {}  # one count for each group with tasks on the node
    for host, count in zip(nodes, counts, strict=True):
        counts_of.setdefault(host, []).append(count)
    ordered = [host for part in parts for host in part]
    return tuple(ordered), tuple(counts_of[host].pop(0) for host in ordered)


def _layout(environ: Mapping[str, str], counts: tuple[int, ...], sizes: list[int]) -> tuple[list[int] | None, str]:
    """Return the node of each task, and its source; ``sizes`` has the number of nodes of each group."""
    text = environ.get("SLURM_DISTRIBUTION", "")
    kind = text.split(":")[0].split(",")[0].lower()
    why = f"SLURM_DISTRIBUTION={text}" if text else "Slurm's default distribution, block"
    if kind == "arbitrary":
        return None, f"{why} leaves the order to a file of the user"
    planesize = integer(environ, "SLURM_DIST_PLANESIZE")
    where: list[int] = []
    start = 0
    for size in sizes:
        here = counts[start : start + size]
        if kind == "plane" and planesize:
            dealt = layout.plane(here, planesize)
        elif kind == "cyclic":
            dealt = layout.plane(here, 1)
        else:
            dealt = layout.block(here)
        where += [start + node for node in dealt]
        start += size
    return where, why


def job(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the job and the variables it was read from, or None outside of Slurm."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}", "SLURM_ARRAY_JOB_ID, SLURM_ARRAY_TASK_ID"
    name = next((name for name in ("SLURM_JOB_ID", "SLURM_JOBID") if environ.get(name)), None)
    return None if name is None else (environ[name], name)


def nodes_of_job(environ: Mapping[str, str]) -> tuple[tuple[str, ...], str] | None:
    """Return all nodes of the job and the variable they were read from, or None if no variable names them."""
    parts = groups(environ)
    if parts:
        return tuple(dict.fromkeys(host for part in parts for host in part)), GROUPS
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        hosts = parsed(environ, name, expand_hostlist)
        if hosts:
            return tuple(hosts), name
    return None


def allocations(environ: Mapping[str, str]) -> list[Allocation]:
    """Return the lists of nodes on which mpirun may have put ranks, the most reliable first."""
    hosts = parsed(environ, "SLURM_JOB_NODELIST", expand_hostlist)
    if not hosts:
        return []
    slots, of_slots = _slots(environ, len(hosts))
    found = []
    if environ.get("SLURM_EXTERNAL_LAUNCHER"):
        # The step runs mpiexec's proxies (MPICH, Intel MPI): its nodes are exactly those with ranks.
        step = parsed(environ, NODELIST, expand_hostlist)
        if step and set(step) <= set(hosts):
            slots_of = dict(zip(hosts, slots or (), strict=False))
            there = tuple(slots_of[host] for host in step) if slots else None
            found.append(Allocation(tuple(step), NODELIST, there, of_slots, all_used=True))
    return [*found, Allocation(tuple(hosts), "SLURM_JOB_NODELIST", slots, of_slots)]


def _slots(environ: Mapping[str, str], nodes: int) -> tuple[tuple[int, ...] | None, str]:
    """Return the number of ranks that mpirun starts on each node: the requested tasks, or by CPUs."""
    if "SLURM_STEP_ID" not in environ:  # true in a batch script; in a step it describes the daemons
        tasks = parsed(environ, "SLURM_TASKS_PER_NODE", expand_counts)
        if tasks and len(tasks) == nodes:
            return tuple(tasks), "SLURM_TASKS_PER_NODE"
    cpus = parsed(environ, "SLURM_JOB_CPUS_PER_NODE", expand_counts)
    if not cpus or len(cpus) != nodes:
        return None, ""
    each = integer(environ, "SLURM_CPUS_PER_TASK") or 1
    return tuple(count // each for count in cpus), "SLURM_JOB_CPUS_PER_NODE"
