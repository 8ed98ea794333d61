"""``mpistrat bench``: measurements, one module of `mpistrat.bench` per subject."""

from __future__ import annotations

import importlib
import sys

import click

# Subject -> what it measures. `mpistrat.bench.<subject>` has `main(arguments) -> int | None`.
SUBJECTS = {
    "input": "Reading batches from HDF5 files.",
    "checkpoint": "Saving variables to a file, and loading them.",
    "files": "Starting on many small HDF5 files.",
    "allreduce": "All-reduce of one array, by size and algorithm.",
    "tune": "The fastest all-reduce algorithm for each size on this machine.",
}


class _Subject(click.Command):
    """A command that passes all its arguments, also --help, to the parser of the subject."""

    def __init__(self, name: str):
        super().__init__(name, callback=self._measure, add_help_option=False)
        self._arguments: list[str] = []

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        self._arguments = list(args)
        return []

    def _measure(self) -> None:
        module = f"mpistrat.bench.{self.name}"
        try:
            subject = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise click.ClickException(f"{module} is not part of this version of mpistrat") from None
        sys.exit(subject.main(self._arguments))


class _Subjects(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBJECTS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _Subject(cmd_name) if cmd_name in SUBJECTS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Subjects"):
            formatter.write_dl(list(SUBJECTS.items()))


@click.command(cls=_Subjects, subcommand_metavar="SUBJECT [ARGS]...")
def command() -> None:
    """Measure the speed of this machine and of the library.

    \b
    mpistrat bench allreduce -n 2 --json out.json

    The arguments after SUBJECT belong to it: see `mpistrat bench SUBJECT --help`.
    """
