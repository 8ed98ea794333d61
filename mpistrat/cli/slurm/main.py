"""``mpistrat slurm``: commands for batch jobs, one file per command."""

from __future__ import annotations

import click

from mpistrat.cli.slurm.write import write


@click.group()
def command() -> None:
    """Batch scripts for SLURM.

    \b
    mpistrat slurm write --nodes 4 --ntasks-per-node 8 --time 2:00:00 prog.py
    """


command.add_command(write)
