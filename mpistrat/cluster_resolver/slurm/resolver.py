"""A resolver for the tasks of a Slurm step."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace

from mpistrat.cluster_resolver import gpus, layout
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.gpus import among
from mpistrat.cluster_resolver.placement import Placement, with_facts
from mpistrat.cluster_resolver.resolver import ClusterResolver
from mpistrat.cluster_resolver.roles import WORKER, Roles, dealt, jobs_told, same_task
from mpistrat.cluster_resolver.slurm import step as slurm_step
from mpistrat.process import mpi


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
        Number of GPUs; by default those of the step on a node, divided evenly. 0 for a job without GPUs.
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
                tasks_per_node = int(tasks_per_node)  # of a variable that Slurm sets
            tasks_per_node = _counted("tasks_per_node", "a number, or a dict from nodes to numbers", tasks_per_node)
        self._tasks_per_node = tasks_per_node
        told = slurm_step.with_step(self._environ)
        rank = slurm_step.number(told, slurm_step.RANK)
        told_jobs, source = jobs_told(jobs, self._environ)
        self._jobs = {WORKER: slurm_step.number(told, slurm_step.SIZE)} if told_jobs is None else told_jobs
        self._step = slurm_step.read(told, self._tasks_per_node)
        if told is not self._environ:
            self._step = _of_batch_script(self._step)
        self._visible = gpus.visible(self._environ)  # before `cluster_spec` may set the variable to this task's own
        self._gpus_per_node = _counted("gpus_per_node", "a number of GPUs", gpus_per_node)
        self._gpus_per_task = _counted("gpus_per_task", "a number of GPUs", gpus_per_task)
        self._counted: int | None = None
        self._check_tasks(None if told_jobs is None else source)
        self._check_gpus()
        by_name = dict(sorted(self._jobs.items()))
        self.roles: Roles = dealt(by_name, self._step.size, spread, self.placement.ranks_by_node, source)
        self.task_type, self.task_id = same_task(self.roles, rank, self._environ)

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
        """Return the number of GPUs of each task; the arguments, those of tf.distribute, are ignored."""
        return {"GPU": self._gpus_of_task()}

    @property
    def placement(self) -> Placement:
        """Place of this task among those of the step, with the source of each fact."""
        placement, environ = self._step, self._environ
        given, counted = self._gpus_per_node, self._counted
        on_node = (given, "gpus_per_node") if given else gpus.on_node(environ, placement.local_size)
        if on_node is None and counted:  # cluster_spec() may have changed CUDA_VISIBLE_DEVICES
            on_node = counted, "what was visible at first"
        placement = gpus.with_gpus(placement, environ, on_node)
        found = {"job": slurm_step.job(environ), "allocation": slurm_step.nodes_of_job(environ)}
        for name, told in found.items():
            if told is not None:
                placement = with_facts(placement, told[1], **{name: told[0]})
        return placement

    def _check_tasks(self, source: str | None) -> None:
        wanted, there = sum(self._jobs.values()), self._step.size
        if wanted == there:
            return
        names = "tasks_per_node" if self._tasks_per_node is not None else slurm_step.COUNTS
        if source is None:
            raise RuntimeError(f"{slurm_step.SIZE}={wanted}, but {names} adds up to {there} tasks: another step's")
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
        told = gpus.on_node(self._environ, self._step.local_size)
        return told and told[0]

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
        # Where none is visible, those that `gpus_per_node` promises are meant.
        ids = self._visible.ids if self._visible else ()
        if not ids:
            ids = tuple(map(str, range(self._gpus_of_node())))
        if len(ids) <= number:  # Slurm shows this task only its own GPUs
            return
        dealt, where = self._dealt(), self._step.node_of_rank
        assert where is not None
        first = dealt.first if dealt else layout.local_rank(where, self._step.rank) * number
        own = ids[first : first + number]
        if len(own) < number:
            raise RuntimeError(
                f"GPUs {first} to {first + number - 1} of the node are for task {self._step.rank}, but "
                f"CUDA_VISIBLE_DEVICES={','.join(ids)} has only {len(ids)}: give gpus_per_node and gpus_per_task "
                "that fit, or auto_set_gpu=False"
            )
        self._environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)


def _of_batch_script(placement: Placement) -> Placement:
    """Return the place of a batch script, whose step is read from the variables of its job."""
    of_job = {
        slurm_step.SIZE: slurm_step.JOB_COUNTS,
        slurm_step.COUNTS: slurm_step.JOB_COUNTS,
        slurm_step.NODELIST: slurm_step.JOB_NODELIST,
    }
    sources = {fact: of_job.get(source, source) for fact, source in placement.sources.items()}
    return replace(placement, launcher="sbatch", sources=sources)


def _counted(name: str, what: str, number: int | None) -> int | None:
    if number is None:
        return None
    try:
        number = operator.index(number)
    except TypeError:
        raise TypeError(f"{name} is {what}, not {number!r}") from None
    if number < 0:
        raise ValueError(f"{name} is {what} from 0 on, not {number}")
    return number
