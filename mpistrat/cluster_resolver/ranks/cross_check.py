"""The check that a resolver and MPI do not contradict each other, and the roles on which all ranks agree."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mpistrat.cluster_resolver import SimpleClusterResolver
from mpistrat.cluster_resolver.choose import resolve
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.compare import contradictions, differences, told_by
from mpistrat.cluster_resolver.mpi.launched import LaunchedClusterResolver
from mpistrat.cluster_resolver.mpi.resolver import placement_in
from mpistrat.cluster_resolver.placement import Placement
from mpistrat.cluster_resolver.resolver import ClusterResolver
from mpistrat.cluster_resolver.roles import WORKER, Roles
from mpistrat.process import mpi
from mpistrat.runtime.agreement.operation import ranks_in_words
from mpistrat.runtime.topology import Topology

_log = logging.getLogger(__name__)
_warned: set[str] = set()
_Task = tuple[str | None, int | None]


def cross_check(resolver: ClusterResolver, topology: Topology, world: Any) -> None:
    """Raise on every rank of a strategy if a resolver contradicts MPI on any rank. Collective.

    The resolver is that of the ranks of the topology, or of the whole job, whose ranks are ``world``. Raise
    RuntimeError if the resolver and MPI differ. Raise the resolver's own exception on the ranks where it fails, and
    RuntimeError on the others.
    """
    asked = asked_once(resolver, topology)
    everyone = _gathered(topology, lambda: _differences(asked, topology, world))
    told = [found if failed is None else (f"the resolver fails: {failed}", "") for failed, found in everyone]
    ranks = [rank for rank, each in enumerate(told) if each is not None]
    if not ranks:
        return
    what, cause = told[topology.rank] or told[ranks[0]]
    first = topology.rank if topology.rank in ranks else ranks[0]
    also = "" if len(ranks) == 1 else f" (and {len(ranks) - 1} other rank{'s' * (len(ranks) > 2)})"
    raise RuntimeError(
        f"{type(resolver).__name__} and MPI contradict each other. Rank {first}{also}: {what}. {cause}".rstrip()
    )


def asked_once(resolver: ClusterResolver, topology: Topology) -> ClusterResolver:
    """Return the resolver, or for one that asks a network service the answer that rank 0 got. Collective.

    A service may refuse thousands of ranks that ask at the same time, or give them different answers. Raise the
    exception of the resolver on rank 0, and the same or a RuntimeError on the other ranks.
    """
    cluster = topology.on_first(lambda: resolver.cluster_spec().as_dict() if resolver.asks_a_service else None)
    if cluster is None or not resolver.asks_a_service:
        return resolver
    return SimpleClusterResolver(ClusterSpec(cluster), task_type=resolver.task_type, task_id=resolver.task_id)


def resolver_of(topology: Topology) -> ClusterResolver:
    """Return the environment's resolver of a topology, or one of MPI's facts if the two contradict each other.

    If a strategy has a part of the job's ranks, the environment describes the whole job. This is not reported.
    """
    known = placement_in(topology)
    try:
        resolver = resolve()
        told = told_by(resolver)
        found = differences(told, known)
        if found is None:
            return resolver
        why = ". ".join(found)
        world = mpi.start().COMM_WORLD
        if world.size > topology.size and not contradictions(told, Placement("MPI", world.size, world.rank)):
            why = ""
    except (RuntimeError, ValueError) as error:
        why = str(error)
    if why and topology.rank == 0 and why not in _warned:
        _warned.add(why)
        _log.warning("strategy.cluster_resolver has the facts of MPI, not those of the environment: %s", why)
    return LaunchedClusterResolver(known, jobs={WORKER: known.size})


def _differences(resolver: ClusterResolver, topology: Topology, world: Any) -> tuple[str, str] | None:
    """Return the differences on this rank and their likely cause, or None without differences."""
    told = told_by(resolver)
    known = placement_in(topology)
    if "size" in told and told["size"].value != known.size and world.size > topology.size:
        known = Placement("MPI", world.size, world.rank)  # the resolver describes the whole job
    return differences(told, known)


def agreed_roles(resolver: ClusterResolver, topology: Topology) -> Roles:
    """Return the rank of each task, as each rank's resolver tells its own. Collective over all ranks of the program.

    Raise TypeError if ``resolver`` is not a ``ClusterResolver``. Raise RuntimeError on every rank if the ranks have
    different jobs, a rank has no task, or a task has no rank or several. Raise the resolver's own exception on the
    ranks where it fails, and RuntimeError on the others.
    """
    if not isinstance(resolver, ClusterResolver):
        raise TypeError(f"cluster_resolver must be a ClusterResolver object, not {resolver!r}")
    resolver = asked_once(resolver, topology)
    told = _gathered(topology, lambda: (resolver.tasks(), (resolver.task_type, resolver.task_id)))
    for rank, (failed, _) in enumerate(told):
        if failed is not None:
            raise RuntimeError(f"the cluster resolver of rank {rank} fails: {failed}")
    _same_jobs([jobs for _, (jobs, _) in told])
    return _one_rank_each(told[topology.rank][1][0], [task for _, (_, task) in told])


def _gathered(topology: Topology, ask: Callable[[], Any]) -> list[tuple[str | None, Any]]:
    """Return of each rank how ``ask`` failed, and what it returned. Raise its exception on the ranks where it fails."""
    found, error = None, None
    try:
        found = ask()
    except Exception as raised:  # a cloud's client may raise anything, and the other ranks wait
        error = raised
    told = topology.all_gather_object((None if error is None else str(error), found))
    if error is not None:
        raise error
    return told


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
