"""What people type: ``mpistrat COMMAND``, or ``python -m mpistrat COMMAND``.

One command is one file, whose ``command`` loads when it is called for. A new one is a new file and a line
in `COMMANDS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import click

from mpistrat.version import __version__

# Command -> what `mpistrat --help` says about it.
COMMANDS = {
    "run": "Start a Python program on this machine, one process per rank.",
    "info": "Show what is installed, which MPI is used, and how ranks communicate.",
    "slurm": "Write batch scripts for SLURM.",
    "check": "Find what will break a job, under the command line that starts it.",
    "hosts": "Show who the ranks are, where that is read from, and what MPI says.",
    "shard": "Divide the rows of HDF5 files over a number of new files.",
    "data": "Show what HDF5 files hold, and how replicas would share them.",
    "bench": "Measure.",
}


class _Commands(click.Group):
    """A group that imports the file of a command when that command is used, and not for the list of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"mpistrat.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mpistrat")
def commands() -> None:
    """The API of tf.distribute on MPI."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, with the arguments of this process unless others are given."""
    commands.main(args=arguments, prog_name="mpistrat")
