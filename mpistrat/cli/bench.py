"""``mpistrat bench``: measurements, one module of `mpistrat.bench` per subject."""

from __future__ import annotations

import importlib
import sys
from functools import partial

import click

# Subject -> what it measures. `mpistrat.bench.<subject>` has `main(arguments) -> int | None`.
SUBJECTS = {
    "allreduce": "All-reduce of one array, by size and algorithm.",
    "tune": "The fastest all-reduce algorithm for each size on this machine.",
}


def _measure(subject: str, arguments: tuple[str, ...]) -> None:
    sys.exit(importlib.import_module(f"mpistrat.bench.{subject}").main(list(arguments)))


@click.group(subcommand_metavar="SUBJECT [ARGS]...")
def command() -> None:
    """Measure the speed of this machine and of the library.

    \b
    mpistrat bench allreduce -n 2 --json out.json

    The arguments after SUBJECT belong to it: see `mpistrat bench SUBJECT --help`.
    """


for _name, _text in SUBJECTS.items():
    # All arguments, also --help, are for the parser of the subject.
    command.add_command(
        click.Command(
            _name,
            {"ignore_unknown_options": True, "allow_interspersed_args": False},
            partial(_measure, _name),
            [click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
            short_help=_text,
            add_help_option=False,
        )
    )
