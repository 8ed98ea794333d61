"""The comparison of a resolver's facts with MPI's on all ranks. The environment explains, MPI decides."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpistrat.cluster_resolver import SimpleClusterResolver
from mpistrat.cluster_resolver.choose import resolve
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.mpi import LaunchedClusterResolver, placement_in
from mpistrat.cluster_resolver.placement import EMPTY, GIVEN, Fact, Placement, training_tasks
from mpistrat.cluster_resolver.resolver import ClusterResolver
from mpistrat.cluster_resolver.roles import WORKER, Roles
from mpistrat.process import mpi
from mpistrat.representation import few, grouped
from mpistrat.runtime.agreement.operation import ranks_in_words
from mpistrat.runtime.topology import Topology

_OF_NODES = ("num_nodes", "ranks_by_node", "ranks_per_node", "local_rank", "local_size")
_READ_AS = {"num_nodes": "ranks_per_node", "ranks_by_node": "node_of_rank"}  # from which they are computed
_GUESSED = "assumed:"
_log = logging.getLogger(__name__)
_warned: set[str] = set()
_Task = tuple[str | None, int | None]


class Contradiction(NamedTuple):
    """A fact in which a resolver and MPI differ: its name in `Placement`, the resolver's value and MPI's."""

    name: str
    claimed: Any
    source: str
    known: Any

    def __str__(self) -> str:
        return f"{self.name} is {_text(self.claimed)} according to {self.source}, {_text(self.known)} according to MPI"


def facts_of_resolver(resolver: ClusterResolver) -> dict[str, Fact]:
    """Return the facts of a resolver about size, rank and nodes, except those that it assumes.

    Raise RuntimeError or ValueError where the resolver itself does.
    """
    if resolver.task_type is None or resolver.task_id is None:
        tasks = training_tasks(resolver.cluster_spec())
        return {"size": Fact("size", len(tasks), GIVEN)} if tasks else {}
    return facts_of(resolver.placement)


def facts_of(placement: Placement) -> dict[str, Fact]:
    """Return the facts of a placement that can be compared with MPI, except assumed ones."""
    if placement.sources.get("size") == EMPTY:
        return {}
    facts = {}
    for name in ("size", "rank", *_OF_NODES):
        value = getattr(placement, name)
        source = placement.sources.get(_READ_AS.get(name, name), "")
        guessed = _GUESSED in source
        # Addresses that a user wrote down may be several names of one machine: nodes are not compared.
        if value is not None and not guessed and not (source == GIVEN and name in _OF_NODES):
            facts[name] = Fact(name, value, source)
    return facts


def contradictions(claimed: Mapping[str, Fact], known: Placement) -> list[Contradiction]:
    """Return the facts in which a resolver and MPI differ. ``claimed`` is a result of `facts_of_resolver`.

    MPI leaves the facts that it does not know at None, and they are not compared.
    """
    size = claimed.get("size")
    if size is None:
        return []
    if size.value != known.size and size.source == GIVEN and size.value == known.num_nodes:
        return []  # a worker of tf.distribute may be a whole machine with all its devices
    differing = []
    for fact in claimed.values():
        value = getattr(known, fact.name)
        if fact.name == "ranks_per_node" and value is not None and "ranks_by_node" not in claimed:
            # MPI orders nodes by their first ranks, a scheduler by its own list: compare the counts without an order.
            fact, value = fact._replace(value=tuple(sorted(fact.value))), tuple(sorted(value))
        elif fact.name == "ranks_per_node":
            continue  # ranks_by_node includes it
        if value is not None and fact.value != value:
            differing.append(Contradiction(fact.name, fact.value, fact.source, value))
    if differing and differing[0].name == "size":  # the other differences follow from it
        return [contradiction for contradiction in differing if contradiction.name in ("size", "rank")]
    return differing


def differences(claimed: Mapping[str, Fact], known: Placement) -> tuple[str, str] | None:
    """Return the contradictions as text, and sentences on their cause and what to do; None without any."""
    differing = contradictions(claimed, known)
    return ("; ".join(map(str, differing)), likely_cause(differing, known)) if differing else None


def likely_cause(differing: list[Contradiction], known: Placement, environ: Mapping[str, str] | None = None) -> str:
    """Return sentences that say what is probably wrong, and what to do."""
    first = differing[0]
    if first.name in ("size", "rank"):
        if known.size == 1 and first.name == "size" and first.claimed > 1:
            return (
                "This process was started alone, without an MPI launcher or with one that the MPI library does not "
                f"understand: start all ranks at once, `mpirun -n {first.claimed} python ...` or `srun --mpi=...`."
            )
        if first.source == GIVEN and first.name == "rank":
            return (
                "Each rank needs the index of its own task; tasks are numbered chief first, then the workers. "
                "MPI numbers the ranks by itself: leave cluster_resolver out, and TF_CONFIG unset."
            )
        if first.source == GIVEN:
            return (
                "Every task that trains is one rank here: start as many ranks as the cluster has chief and "
                "workers, or leave cluster_resolver out: MPI counts the ranks by itself."
            )
        better = _resolved(environ)
        if better is not None and not contradictions(facts_of(better.placement), known):
            return (
                f"The resolver reads variables that are not those of this launch: {better.reason}. Leave "
                "cluster_resolver out, or give it mpistrat.cluster_resolver.resolve()."
            )
        return (
            "The variables are left over from another launch, or a launcher was started inside another one: start "
            "the program from a fresh shell."
        )
    num_nodes = next((contradiction for contradiction in differing if contradiction.name == "num_nodes"), None)
    if num_nodes is None:
        return (
            "The ranks are spread over the nodes in another order than the environment says (--distribution, "
            "--map-by, a rank file): start them in the launcher's default order, or leave cluster_resolver out."
        )
    if num_nodes.claimed < num_nodes.known:
        return (
            "Ranks of one node do not share memory: each has its own container or namespaces. Start one "
            "container per node, or let the containers share /dev/shm and IPC (docker --ipc=host)."
        )
    return (
        "Several of the scheduler's nodes are one machine to MPI: several daemons of the scheduler run on one host, "
        "or /dev/shm is shared between containers."
    )


def _resolved(environ: Mapping[str, str] | None) -> ClusterResolver | None:
    try:
        return resolve(os.environ if environ is None else environ)
    except (RuntimeError, ValueError):
        return None


def _text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    items = ["+".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in value]
    return f"[{few(items, 8)}]"


def cross_check(resolver: ClusterResolver, topology: Topology, world: Any) -> None:
    """Raise on every rank of a strategy if a resolver contradicts MPI on any rank. Collective.

    The resolver describes the ranks of the topology, or the whole job, whose ranks are ``world``. Raise RuntimeError if
    the resolver and MPI differ. Raise the resolver's own exception on the ranks where it fails, and RuntimeError on the
    others.
    """
    asked = resolved_once(resolver, topology)
    everyone = _gathered(topology, lambda: _differences(asked, topology, world))
    reports = [texts if failed is None else (f"the resolver fails: {failed}", "") for failed, texts in everyone]
    ranks = [rank for rank, report in enumerate(reports) if report is not None]
    if not ranks:
        return
    differing, cause = reports[topology.rank] or reports[ranks[0]]
    first = topology.rank if topology.rank in ranks else ranks[0]
    also = "" if len(ranks) == 1 else f" (and {len(ranks) - 1} other rank{'s' * (len(ranks) > 2)})"
    raise RuntimeError(
        f"{type(resolver).__name__} and MPI contradict each other. Rank {first}{also}: {differing}. {cause}".rstrip()
    )


def resolved_once(resolver: ClusterResolver, topology: Topology) -> ClusterResolver:
    """Return the resolver, or rank 0's answer if the resolver asks a network service. Collective.

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
        claimed = facts_of_resolver(resolver)
        texts = differences(claimed, known)
        if texts is None:
            return resolver
        why = ". ".join(texts)
        world = mpi.start().COMM_WORLD
        if world.size > topology.size and not contradictions(claimed, Placement("MPI", world.size, world.rank)):
            why = ""
    except (RuntimeError, ValueError) as error:
        why = str(error)
    if why and topology.rank == 0 and why not in _warned:
        _warned.add(why)
        _log.warning("strategy.cluster_resolver has the facts of MPI, not those of the environment: %s", why)
    return LaunchedClusterResolver(known, jobs={WORKER: known.size})


def _differences(resolver: ClusterResolver, topology: Topology, world: Any) -> tuple[str, str] | None:
    """Return the differences on this rank and their likely cause, or None without differences."""
    claimed = facts_of_resolver(resolver)
    known = placement_in(topology)
    if "size" in claimed and claimed["size"].value != known.size and world.size > topology.size:
        known = Placement("MPI", world.size, world.rank)  # the resolver describes the whole job
    return differences(claimed, known)


def agreed_roles(resolver: ClusterResolver, topology: Topology) -> Roles:
    """Return the rank of each task; each rank's resolver knows its own task. Collective over all ranks of the program.

    Raise TypeError if ``resolver`` is not a ``ClusterResolver``. Raise RuntimeError on every rank if the ranks have
    different jobs, a rank has no task, or a task has no rank or several. Raise the resolver's own exception on the
    ranks where it fails, and RuntimeError on the others.
    """
    if not isinstance(resolver, ClusterResolver):
        raise TypeError(f"cluster_resolver must be a ClusterResolver object, not {resolver!r}")
    resolver = resolved_once(resolver, topology)
    by_rank = _gathered(topology, lambda: (resolver.tasks(), (resolver.task_type, resolver.task_id)))
    for rank, (failed, _) in enumerate(by_rank):
        if failed is not None:
            raise RuntimeError(f"the cluster resolver of rank {rank} fails: {failed}")
    _same_jobs([jobs for _, (jobs, _) in by_rank])
    return _one_rank_each(by_rank[topology.rank][1][0], [task for _, (_, task) in by_rank])


def _gathered(topology: Topology, ask: Callable[[], Any]) -> list[tuple[str | None, Any]]:
    """Return for each rank how ``ask`` failed and its result. Raise its exception on the ranks where it fails."""
    result, error = None, None
    try:
        result = ask()
    except Exception as raised:  # a cloud's client may raise anything, and the other ranks wait
        error = raised
    outcomes = topology.all_gather_object((None if error is None else str(error), result))
    if error is not None:
        raise error
    return outcomes


def _same_jobs(jobs_of_rank: list[dict[str, tuple[int, ...]]]) -> None:
    groups = grouped((_jobs_text(jobs), rank) for rank, jobs in enumerate(jobs_of_rank))
    if len(groups) > 1:
        text = "; ".join(f"{ranks_in_words(ranks)}: {jobs}" for jobs, ranks in groups.items())
        raise RuntimeError(f"the ranks have different jobs: {text}. Give all ranks the same jobs")
    for job, numbers in jobs_of_rank[0].items():
        if numbers != tuple(range(len(numbers))):
            raise RuntimeError(f"the tasks of job {job!r} are numbered from 0 on without gaps, not {numbers}")


def _one_rank_each(jobs: dict[str, tuple[int, ...]], task_of_rank: list[_Task]) -> Roles:
    tasks: dict[_Task, list[int]] = {(job, number): [] for job, numbers in jobs.items() for number in numbers}
    for rank, task in enumerate(task_of_rank):
        if task not in tasks:
            raise RuntimeError(
                f"rank {rank} has no role: its task is {task[1]!r} of job {task[0]!r}, and the jobs are "
                f"{_text(jobs)}. Give each rank a task, or start {len(tasks)} ranks"
            )
        tasks[task].append(rank)
    for (job, number), ranks in sorted(tasks.items(), key=lambda item: -len(item[1])):  # the most ranks first
        if len(ranks) != 1:
            has = ranks_in_words(ranks) if ranks else f"none of the {len(task_of_rank)} ranks"
            raise RuntimeError(
                f"task {number} of job {job!r} must be one rank, and is {has}. Give each rank a task of its own "
                f"of {_text(jobs)}"
            )
    by_job = {job: tuple(tasks[job, number][0] for number in numbers) for job, numbers in jobs.items()}
    return Roles(by_job, "the ranks")


def _jobs_text(jobs: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{job}={len(numbers)}" for job, numbers in sorted(jobs.items())) or "no jobs"
