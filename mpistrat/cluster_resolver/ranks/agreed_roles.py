"""The agreement of all ranks on their roles."""

from __future__ import annotations

from mpistrat.cluster_resolver.ranks.cross_check import asked_once
from mpistrat.cluster_resolver.resolver import ClusterResolver
from mpistrat.cluster_resolver.roles import Roles
from mpistrat.runtime.agreement.operation import ranks_in_words
from mpistrat.runtime.topology import Topology

_Task = tuple[str | None, int | None]


def agreed_roles(resolver: ClusterResolver, topology: Topology) -> Roles:
    """Return the rank of each task, as each rank's resolver tells its own. Collective over all ranks of the program.

    Raises
    ------
    TypeError
        If ``resolver`` is not a ``ClusterResolver``.
    RuntimeError
        On every rank, if the ranks have different jobs, a rank has no task, or a task has no rank or several.
    Exception
        The resolver's own exception on the ranks where it fails; RuntimeError on the others.
    """
    if not isinstance(resolver, ClusterResolver):
        raise TypeError(f"cluster_resolver must be a ClusterResolver object, not {resolver!r}")
    resolver = asked_once(resolver, topology)
    error: Exception | None = None
    problem, jobs = "", {}
    own: _Task = (None, None)
    try:
        jobs, own = resolver.tasks(), (resolver.task_type, resolver.task_id)
    except Exception as raised:  # a cloud's client may raise anything, and the other ranks wait
        error, problem = raised, str(raised)
    told = topology.all_gather_object((problem, jobs, own))
    if error is not None:
        raise error
    for rank, (text, _, _) in enumerate(told):
        if text:
            raise RuntimeError(f"the cluster resolver of rank {rank} fails: {text}")
    _same_jobs([each for _, each, _ in told])
    return _one_rank_each(jobs, [task for _, _, task in told])


def _same_jobs(told: list[dict[str, tuple[int, ...]]]) -> None:
    groups: dict[str, list[int]] = {}
    for rank, jobs in enumerate(told):
        groups.setdefault(_text(jobs), []).append(rank)
    if len(groups) > 1:
        said = "; ".join(f"{ranks_in_words(ranks)}: {jobs}" for jobs, ranks in groups.items())
        raise RuntimeError(f"the ranks have different jobs: {said}. Give all ranks the same jobs")
    for job, numbers in told[0].items():
        if numbers != tuple(range(len(numbers))):
            raise RuntimeError(f"the tasks of job {job!r} are numbered from 0 on without gaps, not {numbers}")


def _one_rank_each(jobs: dict[str, tuple[int, ...]], own: list[_Task]) -> Roles:
    tasks: dict[_Task, list[int]] = {(job, number): [] for job, numbers in jobs.items() for number in numbers}
    for rank, task in enumerate(own):
        if task not in tasks:
            raise RuntimeError(
                f"rank {rank} has no role: its task is {task[1]!r} of job {task[0]!r}, and the jobs are "
                f"{_text(jobs)}. Give each rank a task, or start {len(tasks)} ranks"
            )
        tasks[task].append(rank)
    for (job, number), ranks in sorted(tasks.items(), key=lambda each: -len(each[1])):  # the most ranks first
        if len(ranks) != 1:
            has = ranks_in_words(ranks) if ranks else f"none of the {len(own)} ranks"
            raise RuntimeError(
                f"task {number} of job {job!r} must be one rank, and is {has}. Give each rank a task of its own "
                f"of {_text(jobs)}"
            )
    by_job = {job: tuple(tasks[job, number][0] for number in numbers) for job, numbers in jobs.items()}
    return Roles(by_job, "the ranks")


def _text(jobs: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{job}={len(numbers)}" for job, numbers in sorted(jobs.items())) or "no jobs"
