"""The check that a strategy's resolver and MPI do not contradict each other."""

from __future__ import annotations

import logging
from typing import Any

from mpistrat.cluster_resolver import SimpleClusterResolver
from mpistrat.cluster_resolver.choose import resolve
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.compare import contradictions, likely_cause, told_by
from mpistrat.cluster_resolver.mpi.launched import LaunchedClusterResolver
from mpistrat.cluster_resolver.mpi.resolver import placement_in
from mpistrat.cluster_resolver.placement import Placement
from mpistrat.cluster_resolver.resolver import ClusterResolver
from mpistrat.cluster_resolver.roles import WORKER
from mpistrat.runtime.process import mpi
from mpistrat.runtime.topology import Topology

_log = logging.getLogger(__name__)
_warned: set[str] = set()


def cross_check(resolver: ClusterResolver, topology: Topology, world: Any) -> None:
    """Raise on every rank of a strategy if a resolver contradicts MPI on any rank. Collective.

    The resolver is that of the ranks of the topology, or of the whole job, whose ranks are ``world``.

    Raises
    ------
    RuntimeError
        If the resolver and MPI differ.
    Exception
        The resolver's own exception on the ranks where it fails; RuntimeError on the others.
    """
    told_resolver = asked_once(resolver, topology)
    error: Exception | None = None
    said = None
    try:
        said = _differences(told_resolver, topology, world)
    except Exception as raised:  # a cloud's client may raise anything, and the other ranks wait
        error, said = raised, (f"the resolver fails: {raised}", "")
    told = topology.all_gather_object(said)
    if error is not None:
        raise error
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

    A service may refuse thousands of ranks that ask at the same time, or give them different answers.

    Raises
    ------
    Exception
        The exception of the resolver on rank 0; the same or a RuntimeError on the other ranks.
    """
    cluster = topology.on_first(
        lambda: resolver.cluster_spec().as_dict() if resolver.asks_a_service else None
    )
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
        found = contradictions(told, known)
        if not found:
            return resolver
        why = f"{'; '.join(map(str, found))}. {likely_cause(found, known)}"
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
    found = contradictions(told, known)
    return ("; ".join(map(str, found)), likely_cause(found, known)) if found else None
