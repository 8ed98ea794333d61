"""The comparison of a resolver's facts with MPI's. The environment explains, MPI decides."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpistrat.cluster_resolver.choose import resolve
from mpistrat.cluster_resolver.placement import EMPTY, GIVEN, Fact, Placement, training_tasks
from mpistrat.cluster_resolver.resolver import ClusterResolver

_OF_NODES = ("num_nodes", "ranks_by_node", "ranks_per_node", "local_rank", "local_size")
_READ_AS = {"num_nodes": "ranks_per_node", "ranks_by_node": "node_of_rank"}  # from which they are computed
_GUESSED = "assumed:"


class Contradiction(NamedTuple):
    """A fact in which a resolver and MPI differ: its name in `Placement`, and what the resolver told and MPI knows."""

    name: str
    told: Any
    source: str
    known: Any

    def __str__(self) -> str:
        return f"{self.name} is {_text(self.told)} according to {self.source}, {_text(self.known)} according to MPI"


def told_by(resolver: ClusterResolver) -> dict[str, Fact]:
    """Return the facts of a resolver about size, rank and nodes, without those that it assumes.

    Raise RuntimeError or ValueError where the resolver itself does.
    """
    if resolver.task_type is None or resolver.task_id is None:
        tasks = training_tasks(resolver.cluster_spec())
        return {"size": Fact("size", len(tasks), GIVEN)} if tasks else {}
    return facts_of(resolver.placement)


def facts_of(placement: Placement) -> dict[str, Fact]:
    """Return the facts of a placement that can be compared with MPI, without those that are assumed."""
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


def contradictions(told: Mapping[str, Fact], known: Placement) -> list[Contradiction]:
    """Return the facts in which a resolver and MPI differ. ``told`` is as `told_by` returns it.

    MPI leaves the facts that it does not know at None, and they are not compared.
    """
    size = told.get("size")
    if size is None:
        return []
    if size.value != known.size and size.source == GIVEN and size.value == known.num_nodes:
        return []  # a worker of tf.distribute may be a whole machine with all its devices
    found = []
    for fact in told.values():
        value = getattr(known, fact.name)
        if fact.name == "ranks_per_node" and value is not None and "ranks_by_node" not in told:
            fact, value = fact._replace(value=tuple(sorted(fact.value))), tuple(sorted(value))
        elif fact.name == "ranks_per_node":
            continue  # ranks_by_node includes it
        if value is not None and fact.value != value:
            found.append(Contradiction(fact.name, fact.value, fact.source, value))
    if found and found[0].name == "size":  # the other differences follow from it
        return [each for each in found if each.name in ("size", "rank")]
    return found


def differences(told: Mapping[str, Fact], known: Placement) -> tuple[str, str] | None:
    """Return the contradictions as text, and sentences on their cause and what to do; None without any."""
    found = contradictions(told, known)
    return ("; ".join(map(str, found)), likely_cause(found, known)) if found else None


def likely_cause(found: list[Contradiction], known: Placement, environ: Mapping[str, str] | None = None) -> str:
    """Return sentences that say what is probably wrong, and what to do."""
    first = found[0]
    if first.name in ("size", "rank"):
        if known.size == 1 and first.name == "size" and first.told > 1:
            return (
                "This process was started alone, without an MPI launcher or with one that the MPI library does not "
                f"understand: start all ranks at once, `mpirun -n {first.told} python ...` or `srun --mpi=...`."
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
    told_nodes = next((each for each in found if each.name == "num_nodes"), None)
    if told_nodes is None:
        return (
            "The ranks are spread over the nodes in another order than the environment says (--distribution, "
            "--map-by, a rank file): start them in the launcher's default order, or leave cluster_resolver out."
        )
    if told_nodes.told < told_nodes.known:
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
    text = ", ".join("+".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in value[:8])
    return f"[{text}{', ...' if len(value) > 8 else ''}]"
