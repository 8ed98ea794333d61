"""The ranks of each job, in a program whose ranks have different roles: chief, workers, parameter servers."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.tf_config import TFConfigClusterResolver, config
from mpistrat.runtime.environment import RuntimeOptions, numbers_of_tasks, rc

CHIEF, WORKER, PARAMETER_SERVER = "chief", "worker", "ps"
TF_CONFIG = "TF_CONFIG"
_VARIABLE = RuntimeOptions.roles.variable


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


def jobs_told(jobs: Mapping[str, int] | None, environ: Mapping[str, str]) -> tuple[dict[str, int] | None, str]:
    """Return the number of tasks of each job, and what tells it; None if all ranks are workers.

    The argument comes before the environment: ``MPISTRAT_ROLES``, or a ``TF_CONFIG`` that has parameter servers. Raise
    RuntimeError if the variables of the environment contradict each other, and TypeError or ValueError if ``jobs`` or a
    variable cannot be read.
    """
    if jobs is not None:
        return checked_jobs(jobs), "jobs"
    roles = numbers_of_tasks(rc.roles if environ is os.environ else RuntimeOptions.roles.told(environ))
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


def same_task(roles: Roles, rank: int, environ: Mapping[str, str]) -> tuple[str, int]:
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
