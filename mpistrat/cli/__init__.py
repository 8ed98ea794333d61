"""The command line: ``mpistrat COMMAND``, or ``python -m mpistrat COMMAND``.

A command is an object of its name, or ``command``, in a file that is imported when the command is used. A new
command is a new file and a line in `GROUPS`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import click

from mpistrat.version import __version__

# Heading of `mpistrat --help` -> command -> its module, and its line there.
GROUPS = {
    "Run and batch": {
        "run": ("run.main", "Start a Python program on this machine, one process per rank."),
        "slurm": ("slurm", "Write batch scripts for SLURM."),
        "check": ("check.main", "Find what will break a job. Start it like the job itself."),
        "bench": ("bench", "Measure the speed of this machine and of the library, and whether faults are found."),
    },
    "Look": {
        "info": ("info", "Show what is installed, which MPI is used, and how ranks communicate."),
        "hosts": ("hosts", "Show the ranks, the variables that describe them, and what MPI says."),
        "top": ("top", "Show what each rank of a running job does, or did when it ended."),
        "trace": ("trace", "Merge the traces of all ranks of a job into one file, or summarize them."),
    },
    "Files": {
        "data": ("data", "Show what HDF5 files contain, and how replicas would share them."),
        "shard": ("data", "Divide the rows of HDF5 files among a number of new files."),
        "checkpoint": ("checkpoint", "List, show, verify, compare and convert checkpoints."),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}
_FIRST_STEPS = [
    ("mpistrat info", "Show what is installed, and which MPI."),
    ("mpistrat run -n 4 prog.py", "Start a program on 4 ranks of this machine."),
    ("mpistrat slurm write prog.py", "Print a batch script for a cluster."),
]


class _Commands(click.Group):
    """The group of all commands. It imports the file of a command only when that command is used."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            from mpistrat.cli.table import printable

            if type(error) is not click.ClickException:  # of the command line
                raise
            raise click.ClickException(printable(error.message)) from error
        except ValueError as error:
            from mpistrat.runtime.environment import OptionError

            if not isinstance(error, OptionError):
                raise
            raise click.ClickException(str(error)) from error

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if any(word.endswith(".py") for word in words):
                raise click.UsageError(f"No such option {error.option_name!r}: {_by_run(words)}", ctx) from None
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in COMMANDS or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        close = difflib.get_close_matches(args[0], COMMANDS, 1)
        if args[0].endswith(".py"):
            advice = _by_run(args)
        else:
            advice = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(COMMANDS)}"
        raise click.UsageError(f"No such command {args[0]!r}: {advice}", ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"mpistrat.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name, None) or module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, group in GROUPS.items():
            _write(formatter, heading, [(name, text) for name, (_, text) in group.items()])


def _write(formatter: click.HelpFormatter, heading: str, lines: Sequence[tuple[str, str]]) -> None:
    """Write a section, in colours where the output is a terminal."""
    with formatter.section(click.style(heading, bold=True)):
        formatter.write_dl([(click.style(name, fg="cyan"), text) for name, text in lines])


def _by_run(arguments: Sequence[str]) -> str:
    return f"programs are started by `mpistrat run`: mpistrat run {shlex.join(arguments)}"


@click.command(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mpistrat")
@click.pass_context
def commands(context: click.Context) -> None:
    """The API of tf.distribute on MPI."""
    if context.invoked_subcommand is None:
        formatter = context.make_formatter()
        _write(formatter, "First steps", _FIRST_STEPS)
        click.echo(f"{formatter.getvalue()}\n`mpistrat --help` lists all commands.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. The arguments default to the arguments of this process."""
    _open_closed_streams()
    try:
        commands.main(args=arguments, prog_name="mpistrat")
    except OSError as error:
        # An error of a file has its name. One without a name comes from the output: the disk is full, say.
        if error.filename is not None or isinstance(error, BrokenPipeError):
            raise
        with contextlib.suppress(OSError):
            print(f"mpistrat: the output cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(1)  # the interpreter would write what is left in the buffer, and report the error again


def _open_closed_streams() -> None:
    """Give this process the null device in place of closed standard streams, as after ``>&-`` in a shell.

    The next file to be opened, a pipe of the job for instance, would otherwise become the standard output of the
    commands that are started.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
