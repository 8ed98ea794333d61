"""``mpistrat slurm``: commands for batch jobs, one file per command."""

from __future__ import annotations

import click

from mpistrat.cli.slurm.write import write


@click.group()
def command() -> None:
    """Batch scripts for SLURM."""


command.add_command(write)
