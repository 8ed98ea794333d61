"""``mpistrat check``: find what will break a job before it runs."""

from __future__ import annotations

import json
import os
import subprocess

import click

from mpistrat.bench import under_ranks
from mpistrat.cli import table
from mpistrat.cli.check.checks import CHECKS
from mpistrat.cli.check.job import Check, CheckedJob, CheckOptions, Finding, Severity
from mpistrat.cli.check.watch import Watcher
from mpistrat.cluster_resolver import resolve
from mpistrat.launch.launchers import key_of

_COLOURS = {"ok": "green", "look": "yellow", "fix": "bold red", "not checked": "dim"}


@click.command()
@click.option("--data", metavar="DIR", help="The directory where the program reads data and writes checkpoints.")
@click.option(
    "--limit",
    type=click.FloatRange(1),
    default=60,
    show_default=True,
    help="Seconds after which a rank without progress is reported.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--gpu-direct",
    is_flag=True,
    help="Only test which operations of the MPI library work on GPU memory, and store the result.",
)
def command(data: str | None, limit: float, as_json: bool, gpu_direct: bool) -> None:
    """Find what will break a job. Start it like the job itself.

    \b
    srun -N 3 --ntasks-per-node=4 --mpi=pmix python -m mpistrat check --data /scratch/me
    mpistrat run -n 4 -m mpistrat check

    mpistrat check --gpu-direct  # or under srun: once for each kind of node with GPUs

    Rank 0 prints the findings and what to do. The exit status is 1 if anything must be fixed. A rank that
    cannot communicate with the others is reported, and the others wait for it no longer than the limit.
    """
    if gpu_direct:
        raise SystemExit(_probe(limit))
    try:
        placement = resolve().placement
    except (RuntimeError, ValueError) as error:
        raise click.ClickException(f"the environment of this process cannot be read: {error}") from error
    one_node = placement.local_size == placement.size
    key = key_of(os.environ, one_node=one_node) if placement.size > 1 else None
    with Watcher(CheckOptions(data, limit), placement.rank, placement.size, key) as watcher:
        job = watcher.run()
        if job is None:
            return
        findings = [(check, check.judge(job)) for check in CHECKS]
        must_fix = any(finding.severity is Severity.FIX for _, finding in findings)
        (_print_json if as_json else _print_table)(job, findings, must_fix)
        watcher.reported()
    if must_fix:
        raise SystemExit(1)


def _probe(limit: float) -> int:
    """Run the GPU probe: on these ranks, or on two new ones if there is one rank. The MPI library may crash."""
    if under_ranks.under_several_ranks():
        from mpistrat.cli.check import gpu_probe

        return gpu_probe.main(limit)
    program = under_ranks.command(2, None, ["-m", "mpistrat.cli.check.gpu_probe"])
    try:
        status = subprocess.run(program, env=under_ranks.environment(), timeout=limit).returncode
    except subprocess.TimeoutExpired:
        click.echo(f"the probe did not end within {limit:g} s and was stopped")
        return 1
    if status not in (0, 1):
        click.echo(f"the probe ended with status {status}: device pointers will not be passed to this MPI library")
    return min(1, abs(status))


def _print_json(job: CheckedJob, findings: list[tuple[Check, Finding]], must_fix: bool) -> None:
    checks = {
        check.name: {"found": each.found, "verdict": each.severity.value, "advice": each.advice}
        for check, each in findings
    }
    click.echo(json.dumps({"ranks": job.size, "must fix": must_fix, "checks": checks}, indent=2))


def _print_table(job: CheckedJob, findings: list[tuple[Check, Finding]], must_fix: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = table.console()
    rows = Table("check", "found", "verdict", "what to do", show_lines=True)
    for check, each in findings:
        verdict = each.severity.value
        coloured = f"[{_COLOURS[verdict]}]{verdict}[/{_COLOURS[verdict]}]"
        rows.add_row(check.title, escape(each.found), coloured, escape(each.advice))
    console.print(rows)
    count = sum(each.severity.value == "fix" for _, each in findings)
    console.print(f"{count} to fix" if must_fix else "nothing to fix")
