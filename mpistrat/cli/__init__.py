"""What people type: ``mpistrat COMMAND``, or ``python -m mpistrat COMMAND``.

One command is one file, or one folder with a file ``main``; its ``command`` loads when it is used. A new one is
a new file and a line in `COMMANDS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import click

from mpistrat.version import __version__

# Command -> its module, and what `mpistrat --help` says about it.
COMMANDS = {
    "run": ("run.main", "Start a Python program on this machine, one process per rank."),
    "info": ("info", "Show what is installed, which MPI is used, and how ranks communicate."),
    "slurm": ("slurm.main", "Write batch scripts for SLURM."),
    "check": ("check.main", "Find what will break a job, under the command line that starts it."),
    "hosts": ("hosts", "Show who the ranks are, where that is read from, and what MPI says."),
    "shard": ("shard", "Divide the rows of HDF5 files over a number of new files."),
    "data": ("data", "Show what HDF5 files hold, and how replicas would share them."),
    "bench": ("bench", "Measure."),
}


class _Commands(click.Group):
    """A group that imports the file of a command when that command is used, and not for the list of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"mpistrat.cli.{COMMANDS[cmd_name][0]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mpistrat")
def commands() -> None:
    """The API of tf.distribute on MPI."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, with the arguments of this process unless others are given."""
    commands.main(args=arguments, prog_name="mpistrat")
