"""``mpistrat hosts``: the ranks, the variables that describe them, and what MPI says."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from mpistrat.cli import table
from mpistrat.cluster_resolver import ClusterResolver, MpiClusterResolver, Placement, resolve
from mpistrat.cluster_resolver.compare import differences, told_by
from mpistrat.process import mpi
from mpistrat.process.ranges import ranges
from mpistrat.runtime import affinity
from mpistrat.runtime.topology import Topology

_OF_RANKS = ("rank", "node", "host", "local_rank", "gpu", "device")


@click.command()
@click.option("--no-mpi", is_flag=True, help="Read the environment only: do not start MPI.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(no_mpi: bool, as_json: bool) -> None:
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
            known, everyone, problems = _ask_mpi(resolver, placement)
            rank = known.rank
        except (ImportError, RuntimeError) as error:
            problems.append(str(error))
    if rank == 0:
        report = {
            "resolver": type(resolver).__name__,
            "reason": resolver.reason,
            "facts": {
                name: {"value": value, "from": source, "MPI": _said(known, name)}
                for name, value, source in placement.facts()
            },
            "ranks": [] if known is None else [dict(zip((*_OF_RANKS, "cores"), row, strict=True)) for row in everyone],
            "problems": problems,
        }
        if as_json:
            click.echo(json.dumps(report, indent=2, default=str))
        else:
            _show(report)
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


def _ask_mpi(resolver: ClusterResolver, placement: Placement) -> tuple[Placement, list[list[str]], list[str]]:
    """Return MPI's placement of this rank, the rows of all ranks, and contradictions of one rank. Collective."""
    world = mpi.start().COMM_WORLD
    known = MpiClusterResolver(world).placement
    try:
        own = [*(differences(told_by(resolver), known) or ())]
    except (RuntimeError, ValueError) as error:
        own = [str(error)]
    told = Topology.of(world).all_gather_object((_row(known), own))
    wrong = ([f"rank {rank}: {what[0]}", *what[1:]] for rank, (_, what) in enumerate(told) if what)
    return known, [row for row, _ in told], next(wrong, [])


def _show(report: dict[str, Any]) -> None:
    from rich.table import Table

    console = table.console()
    console.print(f"{report['resolver']}: {report['reason']}", soft_wrap=True, markup=False)
    facts = Table("fact", "value", "variable it came from", "what MPI says")
    for name, fact in report["facts"].items():
        facts.add_row(name, _text(fact["value"]), fact["from"], _text(fact["MPI"]))
    console.print(facts)
    if report["ranks"]:
        ranks = Table(*_OF_RANKS, "cores", title="the ranks, as MPI numbers them", title_justify="left")
        for row in report["ranks"]:
            ranks.add_row(*row.values())
        console.print(ranks)
    for problem in report["problems"]:
        console.print(problem, soft_wrap=True, markup=False)


def _said(known: Placement | None, name: str) -> Any:
    """Return a fact that MPI itself gives, else None: GPUs and the job come from the environment."""
    if known is None or name == "launcher" or known.sources.get(name) != "MPI":
        return None
    return getattr(known, name)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
