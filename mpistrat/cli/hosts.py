"""``mpistrat hosts``: which ranks run where, by the environment and by MPI."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from mpistrat.cli import table
from mpistrat.cluster_resolver import ClusterResolver, MpiClusterResolver, Placement, resolve
from mpistrat.cluster_resolver.compare import differences, facts_of_resolver
from mpistrat.process import mpi
from mpistrat.representation import ranges
from mpistrat.runtime import affinity
from mpistrat.runtime.topology import Topology

_OF_RANKS = ("rank", "node", "host", "local_rank", "gpu", "device")


@click.command()
@click.option("--no-mpi", is_flag=True, help="Read the environment only: do not start MPI.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def hosts(no_mpi: bool, as_json: bool) -> None:
    """Show the ranks, the variables that describe them, and what MPI says.

    \b
    mpistrat hosts
    srun -N 2 -n 8 --mpi=pmix python -m mpistrat hosts

    The exit status is 1 if the environment and MPI contradict each other.
    """
    try:
        resolver = resolve()
        placement = resolver.placement
    except (RuntimeError, ValueError) as error:
        raise click.ClickException(f"the environment cannot be read: {error}") from error
    known: Placement | None = None
    problems: list[str] = []
    everyone = [_row(placement)]
    rank = placement.rank
    if not no_mpi:
        try:
            known, everyone, problems = _ask_mpi(resolver)
            rank = known.rank
        except (ImportError, RuntimeError) as error:
            problems.append(str(error))
    if rank == 0:
        report = {
            "resolver": type(resolver).__name__,
            "reason": resolver.reason,
            "facts": {
                name: {"value": value, "from": source, "MPI": _fact_of_mpi(known, name)}
                for name, value, source in placement.facts()
            },
            "ranks": [] if known is None else [dict(zip((*_OF_RANKS, "cores"), row, strict=True)) for row in everyone],
            "problems": problems,
        }
        if as_json:
            click.echo(json.dumps(report, indent=2, default=str))
        else:
            _show_hosts(report)
    if known is not None:  # the first rank that ends with an error ends all others
        sys.stdout.flush()
        mpi.start().COMM_WORLD.Barrier()
    if problems:
        raise SystemExit(1)


def _row(placement: Placement) -> list[str]:
    """Return the row of one rank in the table of ranks."""
    cores = affinity.cores()
    values = [getattr(placement, name) for name in _OF_RANKS]
    return [*("" if value is None else str(value) for value in values), ranges(cores or ())]


def _ask_mpi(resolver: ClusterResolver) -> tuple[Placement, list[list[str]], list[str]]:
    """Return MPI's placement of this rank, the rows of all ranks, and contradictions of one rank. Collective."""
    world = mpi.start().COMM_WORLD
    known = MpiClusterResolver(world).placement
    try:
        own = [*(differences(facts_of_resolver(resolver), known) or ())]
    except (RuntimeError, ValueError) as error:
        own = [str(error)]
    gathered = Topology.of(world).all_gather_object((_row(known), own))
    wrong = ([f"rank {rank}: {texts[0]}", *texts[1:]] for rank, (_, texts) in enumerate(gathered) if texts)
    return known, [row for row, _ in gathered], next(wrong, [])


def _show_hosts(report: dict[str, Any]) -> None:
    console = table.console()
    console.print(f"{report['resolver']}: {report['reason']}", soft_wrap=True, markup=False)
    facts = table.grid("fact", "value", "variable it came from", "what MPI says")
    for name, fact in report["facts"].items():
        facts.add_row(name, table.text_of(fact["value"]), fact["from"], table.text_of(fact["MPI"]))
    console.print(facts)
    if report["ranks"]:
        ranks = table.grid(*_OF_RANKS, "cores", title="the ranks, as MPI numbers them", title_justify="left")
        for row in report["ranks"]:
            ranks.add_row(*row.values())
        console.print(ranks)
    for problem in report["problems"]:
        console.print(problem, soft_wrap=True, markup=False)


def _fact_of_mpi(known: Placement | None, name: str) -> Any:
    """Return a fact that MPI itself gives, or None: GPUs and the job come from the environment."""
    if known is None or name == "launcher" or known.sources.get(name) != "MPI":
        return None
    return getattr(known, name)
