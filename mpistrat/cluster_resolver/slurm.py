"""The resolver for the tasks of a Slurm step, and the step's tasks and nodes in Slurm's variables.

Inside a step only ``SLURM_STEP_*`` and the variables of the task itself describe the step. ``SLURM_NODELIST``,
``SLURM_JOB_*`` and ``SLURM_NTASKS_PER_NODE`` describe the job, even if the step is smaller; so does
``SLURM_NNODES`` in a batch script. In heterogeneous steps, ``SLURM_STEP_NODELIST`` and
``SLURM_STEP_TASKS_PER_NODE`` are sorted by name, while tasks and ``SLURM_NODEID`` follow the groups.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace

from mpistrat.cluster_resolver import gpus
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.gpus import among
from mpistrat.cluster_resolver.placement import (
    Allocation,
    Placement,
    block,
    integer,
    local_rank_of,
    plane,
    position_of,
    ranks_on,
    required,
    with_facts,
)
from mpistrat.cluster_resolver.resolver import ClusterResolver
from mpistrat.cluster_resolver.roles import WORKER, Roles, checked_task, dealt, requested_jobs
from mpistrat.launch.launchers import SRUN
from mpistrat.launch.slurm import expand_counts, expand_hostlist, groups, left_over, parsed
from mpistrat.process import mpi
from mpistrat.representation import grouped

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
    """Return an environment with the step's variables; for a batch script that is the only task, its job's."""
    if any(environ.get(name) for name in (SIZE, COUNTS, NODELIST)) or environ.get("SLURM_HET_SIZE"):
        return environ
    if environ.get(JOB_COUNTS) != "1" or not environ.get(JOB_NODELIST) or environ.get(RANK) != "0":
        return environ
    return {**environ, SIZE: "1", COUNTS: "1", NODELIST: environ[JOB_NODELIST]}


def read(environ: Mapping[str, str], tasks_per_node: Mapping[str, int] | int | None = None) -> Placement:
    """Return the placement of a task. ``tasks_per_node`` replaces the environment's number of tasks of each node.

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
    of_counts = COUNTS if tasks_per_node is None else "tasks_per_node"
    if rank >= sum(counts):
        raise RuntimeError(
            f"{RANK}={rank}, but the step has {sum(counts)} tasks according to {of_counts}: was this program started "
            "by mpirun? Then `resolve()` finds the right variables"
        )
    sizes = [len(part) for part in parts] or [len(nodes)]
    node_of_rank, why = _layout(environ, counts, sizes)
    # Components of a heterogeneous step may share a node: then ``nodes`` has it once per component.
    position = {host: index for index, host in enumerate(dict.fromkeys(nodes))}
    names, merged = tuple(position), [position[host] for host in nodes]
    totals = [0] * len(names)
    for index, count in zip(merged, counts, strict=True):
        totals[index] += count
    node = position_of(environ.get("SLURMD_NODENAME"), names)
    node_id = integer(environ, NODE)
    if node is None and node_id is not None and node_id < len(nodes):
        node = merged[node_id]
    gtids = environ.get("SLURM_GTIDS", "") if tasks_per_node is None else ""
    if node_of_rank is not None and node is not None and gtids:
        here = [entry for entry, index in enumerate(merged) if index == node]
        expected = [",".join(map(str, ranks_on(node_of_rank, entry))) for entry in here]
        if gtids not in expected:
            tasks = " and ".join(expected)
            why = f"{why} would put tasks {tasks} on {names[node]}, but SLURM_GTIDS={gtids}"
            node_of_rank = None
    if node_of_rank is not None:
        node_of_rank = [merged[entry] for entry in node_of_rank]
        node = node_of_rank[rank] if node is None else node
    elif len(names) == 1:
        node_of_rank, why = [0] * sum(counts), "all tasks are on this node"
    local_rank, of_local_rank = integer(environ, _LOCAL_RANK), _LOCAL_RANK
    # SLURM_LOCALID counts the tasks of one component: wrong where components share a node.
    shared = node is not None and gtids and len(gtids.split(",")) < totals[node]
    if local_rank is None or shared or len(names) < len(nodes):
        local_rank = None if node_of_rank is None else local_rank_of(node_of_rank, rank)
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
        node_of_rank=None if node_of_rank is None else tuple(node_of_rank),
        sources={
            "launcher": SIZE,
            "size": SIZE if environ.get(SIZE) else of_counts,
            "rank": RANK,
            "nodes": of_counts if isinstance(tasks_per_node, Mapping) else of_nodes,
            "ranks_per_node": of_counts,
            "node_of_rank": why,
            "host": "SLURMD_NODENAME" if environ.get("SLURMD_NODENAME") else NODELIST,
            "node": NODE if environ.get(NODE) else why,
            "local_rank": of_local_rank,
            "local_size": of_counts,
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
    counts_of = grouped(zip(nodes, counts, strict=True))  # one count for each group with tasks on the node
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
    node_of_task: list[int] = []
    start = 0
    for size in sizes:
        here = counts[start : start + size]
        if kind == "plane" and planesize:
            dealt = plane(here, planesize)
        elif kind == "cyclic":
            dealt = plane(here, 1)
        else:
            dealt = block(here)
        node_of_task += [start + node for node in dealt]
        start += size
    return node_of_task, why


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
    for name in (JOB_NODELIST, "SLURM_NODELIST"):
        hosts = parsed(environ, name, expand_hostlist)
        if hosts:
            return tuple(hosts), name
    return None


def allocations(environ: Mapping[str, str]) -> list[Allocation]:
    """Return the lists of nodes on which mpirun may have put ranks, the most reliable first."""
    hosts = parsed(environ, JOB_NODELIST, expand_hostlist)
    if not hosts:
        return []
    slots, of_slots = _slots(environ, len(hosts))
    of_step = []
    if environ.get("SLURM_EXTERNAL_LAUNCHER"):
        # The step runs mpiexec's proxies (MPICH, Intel MPI): its nodes are exactly those with ranks.
        step = parsed(environ, NODELIST, expand_hostlist)
        if step and set(step) <= set(hosts):
            slots_of = dict(zip(hosts, slots or (), strict=False))
            there = tuple(slots_of[host] for host in step) if slots else None
            of_step.append(Allocation(tuple(step), NODELIST, there, of_slots, all_used=True))
    return [*of_step, Allocation(tuple(hosts), JOB_NODELIST, slots, of_slots)]


def _slots(environ: Mapping[str, str], nodes: int) -> tuple[tuple[int, ...] | None, str]:
    """Return the number of ranks that mpirun starts on each node: the requested tasks, or by CPUs."""
    if "SLURM_STEP_ID" not in environ:  # true in a batch script; in a step it describes the daemons
        tasks = parsed(environ, "SLURM_TASKS_PER_NODE", expand_counts)
        if tasks and len(tasks) == nodes:
            return tuple(tasks), "SLURM_TASKS_PER_NODE"
    cpus = parsed(environ, "SLURM_JOB_CPUS_PER_NODE", expand_counts)
    if not cpus or len(cpus) != nodes:
        return None, ""
    cpus_per_task = integer(environ, "SLURM_CPUS_PER_TASK") or 1
    return tuple(count // cpus_per_task for count in cpus), "SLURM_JOB_CPUS_PER_NODE"


class SlurmClusterResolver(ClusterResolver):
    """The tasks that ``srun`` started, read from ``SLURM_*`` only.

    A batch script that runs without ``srun`` is one task if its job has one. Nodes and tasks are in Slurm's order.
    Jobs take consecutive ranks, sorted by name. Under ``mpirun`` inside a batch job these variables describe the
    daemons of ``mpirun``: use `resolve` there.

    Parameters
    ----------
    jobs : mapping, optional
        Number of tasks of each job. By default the jobs of ``MPISTRAT_ROLES`` or of a ``TF_CONFIG`` with parameter
        servers, else all tasks are ``"worker"``.
    port_base : int
        Port of the first task of a node. The next task of the node has the next port.
    gpus_per_node, gpus_per_task : int, optional
        Number of GPUs; by default the step's GPUs on a node, divided evenly. 0 for a job without GPUs.
    tasks_per_node : int or mapping, optional
        Number of tasks of every node, or of each node by name. Replaces ``SLURM_STEP_TASKS_PER_NODE``.
    auto_set_gpu : bool
        Whether `cluster_spec` sets ``CUDA_VISIBLE_DEVICES`` of this process to the GPUs of its task.
    rpc_layer : str or None
        Protocol of the addresses that `master` returns.
    spread : str, optional
        Job that has the last task of each node, such as ``"ps"``. The other jobs share the rest.
    environ : mapping, optional
        Environment to read, and to set ``CUDA_VISIBLE_DEVICES`` in; ``os.environ`` by default.

    Attributes
    ----------
    roles : Roles
        Rank of each task.

    Raises
    ------
    RuntimeError
        If the environment lacks a variable (the message names it). If the step has more or fewer tasks than the jobs
        need, or a node fewer GPUs than its tasks need.
    ValueError
        If a variable has a value that cannot be read, or a number is negative. If the job to spread has another
        number of tasks than there are nodes.
    TypeError
        If ``jobs``, ``spread``, ``tasks_per_node`` or a number has another type.

    Examples
    --------
    >>> environ = {
    ...     "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "tux[07-08]",
    ...     "SLURM_STEP_TASKS_PER_NODE": "2,1", "CUDA_VISIBLE_DEVICES": "",
    ... }
    >>> resolver = SlurmClusterResolver({"ps": 1, "worker": 2}, environ=environ)
    >>> resolver.cluster_spec()
    ClusterSpec({'ps': ['tux07:8888'], 'worker': ['tux07:8889', 'tux08:8888']})
    >>> resolver.get_task_info(), resolver.master()
    (('worker', 1), 'grpc://tux08:8888')
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        spread: str | None = None,
        environ: MutableMapping[str, str] | None = None,
    ):
        mpi.end_job_on_error()
        self._environ = os.environ if environ is None else environ
        self._port_base = port_base
        self._auto_set_gpu = auto_set_gpu
        self.rpc_layer = rpc_layer
        if not isinstance(tasks_per_node, Mapping):
            if isinstance(tasks_per_node, str) and tasks_per_node.isdigit():
                tasks_per_node = int(tasks_per_node)  # the text of a variable that Slurm sets
            tasks_per_node = _counted("tasks_per_node", "a number, or a dict from nodes to numbers", tasks_per_node)
        self._tasks_per_node = tasks_per_node
        step_environ = with_step(self._environ)
        rank = number(step_environ, RANK)
        requested, source = requested_jobs(jobs, self._environ)
        self._jobs = {WORKER: number(step_environ, SIZE)} if requested is None else requested
        self._step = read(step_environ, self._tasks_per_node)
        if step_environ is not self._environ:
            self._step = _of_batch_script(self._step)
        self._visible = gpus.visible(self._environ)  # before `cluster_spec` may set the variable to this task's own
        self._gpus_per_node = _counted("gpus_per_node", "a number of GPUs", gpus_per_node)
        self._gpus_per_task = _counted("gpus_per_task", "a number of GPUs", gpus_per_task)
        self._counted: int | None = None
        self._check_tasks(None if requested is None else source)
        self._check_gpus()
        by_name = dict(sorted(self._jobs.items()))
        self.roles: Roles = dealt(by_name, self._step.size, spread, self.placement.ranks_by_node, source)
        self.task_type, self.task_id = checked_task(self.roles, rank, self._environ)

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks. With ``auto_set_gpu``, also set ``CUDA_VISIBLE_DEVICES``.

        Raises
        ------
        RuntimeError
            If the environment does not tell which task is on which node, as with ``--distribution=arbitrary``.
        """
        addresses = self.placement.addresses(self._port_base)
        if addresses is None:
            raise RuntimeError(
                f"the environment does not tell which task is on which node: {self._step.sources['node_of_rank']}. "
                "MpiClusterResolver(comm) asks MPI; or give SlurmClusterResolver(tasks_per_node={'node': tasks, ...})"
            )
        if self._auto_set_gpu:
            self._set_visible_gpus()
        return self.roles.cluster(addresses)

    def tasks(self) -> dict[str, tuple[int, ...]]:
        """Return the task numbers of each job."""
        return self.roles.tasks()

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return the job of this process, and the number of this process among the job's tasks."""
        return self.task_type, self.task_id

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the number of GPUs of each task; the arguments exist for tf.distribute and are ignored."""
        return {"GPU": self._gpus_of_task()}

    @property
    def placement(self) -> Placement:
        """Placement of this task in the step, with the source of each fact."""
        placement, environ = self._step, self._environ
        per_node, counted = self._gpus_per_node, self._counted
        on_node = (per_node, "gpus_per_node") if per_node else gpus.on_node(environ, placement.local_size)
        if on_node is None and counted:  # cluster_spec() may have changed CUDA_VISIBLE_DEVICES
            on_node = counted, "what was visible at first"
        placement = gpus.with_gpus(placement, environ, on_node)
        facts = {"job": job(environ), "allocation": nodes_of_job(environ)}
        for name, fact in facts.items():
            if fact is not None:
                placement = with_facts(placement, fact[1], **{name: fact[0]})
        return placement

    def _check_tasks(self, source: str | None) -> None:
        wanted, there = sum(self._jobs.values()), self._step.size
        if wanted == there:
            return
        names = "tasks_per_node" if self._tasks_per_node is not None else COUNTS
        if source is None:
            raise RuntimeError(f"{SIZE}={wanted}, but {names} adds up to {there} tasks: another step's")
        raise RuntimeError(
            f"{source}: {self._jobs} need {wanted} tasks, but the step has {there} according to {names}: start it with "
            f"`srun --ntasks={wanted}`, or give other jobs"
        )

    def _check_gpus(self) -> None:
        if self._gpus_per_task is None:
            return
        most, there = self._most_on_node, self._gpus_of_node()
        if most * self._gpus_per_task > there:
            raise RuntimeError(
                f"gpus_per_task={self._gpus_per_task} needs {most * self._gpus_per_task} GPUs on a node with {most} "
                f"tasks, but it has {there}: start fewer tasks per node, or ask for more GPUs (--gpus-per-node)"
            )

    @property
    def _most_on_node(self) -> int:
        return max(self._step.ranks_per_node or (1,))

    def _on_node(self) -> int | None:
        counted = gpus.on_node(self._environ, self._step.local_size)
        return counted and counted[0]

    def _gpus_of_node(self) -> int:
        """Return the number of the step's GPUs on this node. A task may see only its own part."""
        if self._gpus_per_node is not None:
            return self._gpus_per_node
        if self._counted is None:
            self._counted = max(gpus.count(self._environ), self._on_node() or 0)
        return self._counted

    def _gpus_of_task(self) -> int:
        if self._gpus_per_task is not None:
            return self._gpus_per_task
        dealt = self._dealt()
        return self._gpus_of_node() // self._most_on_node if dealt is None else dealt.number

    def _dealt(self) -> gpus.Share | None:
        """Return this task's share of the GPUs that it sees, if Slurm shows it only a part of the node's."""
        step, seen, there = self._step, self._visible, self._on_node()
        if self._gpus_per_node is not None or seen is None or len(seen.ids) >= (there or 0):
            return None
        if step.local_rank is None or step.local_size is None:
            return gpus.Share(0, len(seen.ids))
        index, users = among(self._environ, len(seen.ids), step.local_rank, step.local_size, there)
        if self._gpus_per_task is not None:
            return gpus.Share(index * self._gpus_per_task, self._gpus_per_task)
        return gpus.share(seen.ids, index, users)

    def _set_visible_gpus(self) -> None:
        number = self._gpus_of_task()
        if number == 0:
            return
        # If no GPU is visible, take the numbers of the GPUs that `gpus_per_node` promises.
        ids = self._visible.ids if self._visible else ()
        if not ids:
            ids = tuple(map(str, range(self._gpus_of_node())))
        if len(ids) <= number:  # Slurm shows this task only its own GPUs
            return
        dealt, node_of_rank = self._dealt(), self._step.node_of_rank
        assert node_of_rank is not None
        first = dealt.first if dealt else local_rank_of(node_of_rank, self._step.rank) * number
        own = ids[first : first + number]
        if len(own) < number:
            raise RuntimeError(
                f"GPUs {first} to {first + number - 1} of the node are for task {self._step.rank}, but "
                f"CUDA_VISIBLE_DEVICES={','.join(ids)} has only {len(ids)}: give gpus_per_node and gpus_per_task "
                "that fit, or auto_set_gpu=False"
            )
        self._environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)


def _of_batch_script(placement: Placement) -> Placement:
    """Return the placement of a batch script, whose step is read from the variables of its job."""
    of_job = {SIZE: JOB_COUNTS, COUNTS: JOB_COUNTS, NODELIST: JOB_NODELIST}
    sources = {fact: of_job.get(source, source) for fact, source in placement.sources.items()}
    return replace(placement, launcher="sbatch", sources=sources)


def _counted(name: str, description: str, number: int | None) -> int | None:
    if number is None:
        return None
    try:
        number = operator.index(number)
    except TypeError:
        raise TypeError(f"{name} is {description}, not {number!r}") from None
    if number < 0:
        raise ValueError(f"{name} is {description} from 0 on, not {number}")
    return number
