"""A strategy's resolver and MPI must not contradict each other."""

from __future__ import annotations

from typing import Any

from mpistrat.cluster_resolver.choose import resolve
from mpistrat.cluster_resolver.compare import contradictions, likely_cause, told_by
from mpistrat.cluster_resolver.launched import LaunchedClusterResolver
from mpistrat.cluster_resolver.mpi import placement_in
from mpistrat.cluster_resolver.placement import Placement
from mpistrat.cluster_resolver.resolver import ClusterResolver
from mpistrat.runtime.topology import Topology


def cross_check(resolver: ClusterResolver, topology: Topology, world: Any) -> None:
    """Raise on every rank if a resolver contradicts MPI on any of them. Collective.

    Parameters
    ----------
    resolver : ClusterResolver
        It describes the ranks of the topology, or those of the whole job.
    topology : Topology
    world : mpi4py.MPI.Intracomm
        All ranks of the job.

    Raises
    ------
    RuntimeError
        If they differ.
    Exception
        On the rank where the resolver itself raises it; a RuntimeError on the others.
    """
    error: Exception | None = None
    said = None
    try:
        said = _differences(resolver, topology, world)
    except Exception as raised:  # whatever a client of a cloud raises: the others wait
        error, said = raised, (f"the resolver fails: {raised}", "")
    told = topology.all_gather_object(said)
    if error is not None:
        raise error
    ranks = [rank for rank, each in enumerate(told) if each is not None]
    if not ranks:
        return
    what, cause = told[topology.rank] or told[ranks[0]]
    who = topology.rank if topology.rank in ranks else ranks[0]
    also = "" if len(ranks) == 1 else f" (and {len(ranks) - 1} other rank{'s' * (len(ranks) > 2)})"
    raise RuntimeError(
        f"{type(resolver).__name__} and MPI contradict each other. Rank {who}{also}: {what}. {cause}".rstrip()
    )


def resolver_of(topology: Topology) -> ClusterResolver:
    """What the environment says about the ranks of a topology, or, where that is something else, what MPI says."""
    known = placement_in(topology)
    try:
        resolver = resolve()
        if not contradictions(told_by(resolver), known):
            return resolver
    except (RuntimeError, ValueError):
        pass
    return LaunchedClusterResolver(known)


def _differences(resolver: ClusterResolver, topology: Topology, world: Any) -> tuple[str, str] | None:
    """What differs on this rank, and why that probably is."""
    told = told_by(resolver)
    known = placement_in(topology)
    if "size" in told and told["size"].value != known.size and world.size > topology.size:
        known = Placement("MPI", world.size, world.rank)  # it describes the job, of which these are a part
    found = contradictions(told, known)
    return ("; ".join(map(str, found)), likely_cause(found, known)) if found else None
