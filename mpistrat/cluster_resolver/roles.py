"""The ranks of each job (chief, workers, parameter servers), and the resolver for the cluster in ``TF_CONFIG``."""

from __future__ import annotations

import itertools
import json
import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec, task_number
from mpistrat.cluster_resolver.resolver import ClusterResolver, with_protocol
from mpistrat.runtime.environment import RuntimeOptions, numbers_of_tasks, rc

CHIEF, WORKER, PARAMETER_SERVER = "chief", "worker", "ps"
TF_CONFIG = "TF_CONFIG"
_VARIABLE = RuntimeOptions.roles.variable


class TFConfigClusterResolver(ClusterResolver):
    """The cluster in ``TF_CONFIG``. Each call reads the variable again.

    The variable holds JSON: ``{"cluster": {"worker": ["a:8888", "b:8888"]}, "task": {"type": "worker", "index":
    1}}``, and may have ``rpc_layer`` and ``session_master``.

    Parameters
    ----------
    task_type, task_id, rpc_layer : optional
        Replace the values in the variable.
    environment : str, optional
        Name of the environment.
    environ : mapping, optional
        Environment to read; ``os.environ`` by default.

    Examples
    --------
    >>> environ = {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'}
    >>> resolver = TFConfigClusterResolver(rpc_layer="grpc", environ=environ)
    >>> resolver.task_id, resolver.master()
    (1, 'grpc://b:1')
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ):
        self._environ = os.environ if environ is None else environ
        self._environment = environment
        self.rpc_layer = rpc_layer
        self.task_type = None if task_type is None else str(task_type)
        self.task_id = None if task_id is None else task_number(task_id, "task_id must be a number from 0 on")

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster in the variable, or an empty one if it has no key ``cluster``.

        Raises
        ------
        ValueError
            If the variable is not a JSON object.
        """
        return ClusterSpec(config(self._environ).get("cluster", {}))

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default this one; an empty string if the cluster has one task.

        If the variable has ``session_master``, return that.

        Raises
        ------
        ValueError
            If the cluster has no such task, or the task of this process is not known.
        """
        session_master = config(self._environ).get("session_master")
        if session_master is not None:
            return str(session_master)
        cluster = self.cluster_spec()
        if sum(map(cluster.num_tasks, cluster.jobs)) <= 1:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise ValueError(
                f'TF_CONFIG has tasks of {cluster.jobs}, but no "task" with the type and index of this process; '
                "add it, or give task_type and task_id"
            )
        return with_protocol(
            cluster.task_address(task_type, task_id), self.rpc_layer if rpc_layer is None else rpc_layer
        )

    @property
    def environment(self) -> str | None:
        """Name of the environment."""
        return self._environment

    def _default(self, name: str) -> Any:
        value = super()._default(name)
        if value is not None:
            return value
        if name == "rpc_layer":
            return config(self._environ).get("rpc_layer")
        own = _task(self._environ).get("type" if name == "task_type" else "index")
        if own is None or name == "task_type":
            return own and str(own)
        return task_number(own, '"index" of "task" in TF_CONFIG must be a number from 0 on')


def config(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of ``TF_CONFIG``, or an empty dict if it is not set.

    Raise ValueError if the variable is not a JSON object.
    """
    text = environ.get("TF_CONFIG", "")
    if not text.strip():
        return {}
    # Python 3.14 reads a text that others refuse (RecursionError). An error about what it holds would show it whole.
    if (
        max(itertools.accumulate(1 if bracket in "[{" else -1 for bracket in re.findall(r"[][{}]", text)), default=0)
        > 100
    ):
        raise ValueError(f"TF_CONFIG is nested too deeply ({len(text)} characters)")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(f"TF_CONFIG={text!r} is not JSON: {error.msg}", error.doc, error.pos) from None
    if not isinstance(content, dict):
        raise ValueError(f"TF_CONFIG must be a JSON object with the keys 'cluster' and 'task', not {text!r}")
    return content


def _task(environ: Mapping[str, str]) -> dict[str, Any]:
    task = config(environ).get("task") or {}
    if not isinstance(task, dict):
        raise TypeError(f'"task" in TF_CONFIG must be an object with the keys "type" and "index", not {task!r}')
    return task


@dataclass(frozen=True)
class Roles:
    """The rank of each task of each job.

    Attributes
    ----------
    ranks : mapping
        For each job the ranks of its tasks, in the order of task numbers.
    source : str
        Argument or variable that tells the number of tasks.

    Examples
    --------
    >>> roles = Roles({"chief": (0,), "worker": (1, 2), "ps": (3,)})
    >>> roles.chief, roles.workers, roles.parameter_servers
    (0, (1, 2), (3,))
    >>> roles.task_of(2), roles.rank_of("ps", 0)
    (('worker', 1), 3)
    """

    ranks: Mapping[str, tuple[int, ...]]
    source: str = field(default="", compare=False)

    @property
    def chief(self) -> int | None:
        """Rank of task 0 of the chief, the coordinator; None without a chief."""
        ranks = self.ranks.get(CHIEF)
        return ranks[0] if ranks else None

    @property
    def workers(self) -> tuple[int, ...]:
        """Ranks of the workers, in the order of task numbers."""
        return self.ranks.get(WORKER, ())

    @property
    def parameter_servers(self) -> tuple[int, ...]:
        """Ranks of the parameter servers, in the order of task numbers."""
        return self.ranks.get(PARAMETER_SERVER, ())

    @property
    def size(self) -> int:
        """Number of tasks of all jobs."""
        return sum(map(len, self.ranks.values()))

    def tasks(self) -> dict[str, tuple[int, ...]]:
        """Return the task numbers of each job."""
        return {job: tuple(range(len(ranks))) for job, ranks in self.ranks.items()}

    def task_of(self, rank: int) -> tuple[str, int]:
        """Return the job of a rank, and its task number there.

        Raises
        ------
        ValueError
            If the rank has no task.
        """
        for job, ranks in self.ranks.items():
            if rank in ranks:
                return job, ranks.index(rank)
        raise ValueError(f"rank {rank} has no task: {self}")

    def rank_of(self, job: str, task: int) -> int:
        """Return the rank of a task.

        Raises
        ------
        ValueError
            If the task does not exist.
        """
        ranks = self.ranks.get(job, ())
        if not 0 <= task < len(ranks):
            raise ValueError(f"there is no task {task} of job {job!r}: {self}")
        return ranks[task]

    def cluster(self, addresses: Sequence[str]) -> ClusterSpec:
        """Return the address of each task, from the address of each rank."""
        return ClusterSpec({job: [addresses[rank] for rank in ranks] for job, ranks in self.ranks.items()})

    def __str__(self) -> str:
        return ", ".join(f"{job} on ranks {list(ranks)}" for job, ranks in self.ranks.items()) or "no jobs"


def requested_jobs(jobs: Mapping[str, int] | None, environ: Mapping[str, str]) -> tuple[dict[str, int] | None, str]:
    """Return the number of tasks of each job and its source; None instead of the numbers if all ranks are workers.

    The argument comes before the environment: ``MPISTRAT_ROLES``, or a ``TF_CONFIG`` that has parameter servers. Raise
    RuntimeError if the variables of the environment contradict each other, and TypeError or ValueError if ``jobs`` or a
    variable cannot be read.
    """
    if jobs is not None:
        return checked_jobs(jobs), "jobs"
    roles = numbers_of_tasks(rc.roles if environ is os.environ else RuntimeOptions.roles.value_in(environ))
    cluster = ClusterSpec(config(environ).get("cluster", {}))
    in_config = {job: cluster.num_tasks(job) for job in cluster.jobs}
    if not in_config.get(PARAMETER_SERVER):  # for synchronous training: the launcher knows it better
        in_config = {}
    if roles and in_config and roles != in_config:
        raise RuntimeError(
            f"{_VARIABLE} and TF_CONFIG contradict each other: {roles} and {in_config}; set one of them, or give jobs"
        )
    if roles:
        return roles, _VARIABLE
    return (in_config, TF_CONFIG) if in_config else (None, "the launcher")


def checked_jobs(jobs: Mapping[str, int]) -> dict[str, int]:
    """Return the number of tasks of each job.

    Raise TypeError if ``jobs`` is not a mapping from names to numbers, and ValueError if a number is negative.
    """
    if not isinstance(jobs, Mapping) or not all(isinstance(job, str) for job in jobs):
        raise TypeError(f"jobs is a dict from names of jobs to numbers of tasks, not {jobs!r}")
    try:
        counts = {job: operator.index(count) for job, count in jobs.items()}
    except TypeError:
        raise TypeError(f"jobs is a dict from names of jobs to numbers of tasks, not {dict(jobs)!r}") from None
    if any(count < 0 for count in counts.values()):
        raise ValueError(f"each job must have 0 tasks or more: jobs={dict(jobs)!r}")
    return counts


def dealt(
    jobs: Mapping[str, int],
    size: int,
    spread: str | None = None,
    ranks_by_node: Sequence[Sequence[int]] | None = None,
    source: str = "jobs",
) -> Roles:
    """Return the ranks of each job: consecutive ranks, in the order of the jobs.

    The job ``spread`` has the last rank of each node of ``ranks_by_node``, and the other jobs have consecutive ranks
    among the rest. ``source`` is the argument or variable that tells the jobs. Raise RuntimeError if the jobs have more
    or fewer tasks than there are ranks, or the nodes are not known and ``spread`` is given, TypeError if ``spread`` is
    not a string, and ValueError if ``spread`` is not one of the jobs, or has another number of tasks than there are
    nodes.
    """
    wanted = sum(jobs.values())
    if wanted != size:
        raise RuntimeError(
            f"{source} names {wanted} tasks, {dict(jobs)}, but the program has {size} rank{'s' * (size != 1)}: start "
            f"{wanted}, as in `mpistrat run -n {wanted}`, or name {size} tasks"
        )
    apart: list[int] = []
    if spread is not None:
        apart = _last_of_nodes(jobs, spread, ranks_by_node)
    rest = iter(rank for rank in range(size) if rank not in apart)
    ranks = {
        job: tuple(apart) if job == spread else tuple(next(rest) for _ in range(count)) for job, count in jobs.items()
    }
    return Roles(ranks, source)


def checked_task(roles: Roles, rank: int, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the task of a rank, which ``TF_CONFIG`` must not contradict if it tells the jobs.

    Raise RuntimeError if ``TF_CONFIG`` gives this rank another task.
    """
    task = roles.task_of(rank)
    if roles.source == TF_CONFIG:
        config = TFConfigClusterResolver(environ=environ)
        own = config.task_type, config.task_id
        if own not in (task, (None, None)):
            raise RuntimeError(
                f"TF_CONFIG and MPI contradict each other: rank {rank} is task {own[1]} of job {own[0]!r} according "
                f"to TF_CONFIG, and task {task[1]} of job {task[0]!r} by the order of its jobs. Leave out its "
                '"task", or use TFConfigClusterResolver'
            )
    return task


def _last_of_nodes(jobs: Mapping[str, int], spread: str, ranks_by_node: Sequence[Sequence[int]] | None) -> list[int]:
    if not isinstance(spread, str):
        raise TypeError(f"spread is the name of a job, not {spread!r}")
    if spread not in jobs:
        raise ValueError(f"spread={spread!r} is not one of the jobs {list(jobs)}")
    if ranks_by_node is None:
        raise RuntimeError(
            f"spread={spread!r} needs the node of each rank, which the environment does not tell: "
            "MpiClusterResolver(comm) asks MPI"
        )
    if jobs[spread] != len(ranks_by_node):
        raise ValueError(
            f"spread={spread!r} puts one task on each node: it has {jobs[spread]} tasks, and the ranks are on "
            f"{len(ranks_by_node)} node{'s' * (len(ranks_by_node) != 1)}"
        )
    return [max(ranks) for ranks in ranks_by_node]
