"""``mpistrat bench``: measurements, one module of `mpistrat.bench` per subject."""

from __future__ import annotations

import importlib
import sys

import click

# Subject -> what it measures. `mpistrat.bench.<subject>` has `main(arguments) -> int | None`.
SUBJECTS = {
    "chaos": "Whether a program goes on after the loss of ranks, with the same result.",
    "corrupt": "Whether the ranks of a program find a bit that flips (`mpistrat run --verify`).",
    "tune": "The fastest all-reduce algorithm for each size on this machine.",
}


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="\b\n" + "\n".join(f"{name:10} {text}" for name, text in SUBJECTS.items()),
)
@click.argument("subject", type=click.Choice(list(SUBJECTS)))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(subject: str, arguments: tuple[str, ...]) -> None:
    """Measure the speed of this machine and of the library, and whether faults are found.

    \b
    mpistrat bench tune -n 4 --dry-run
    mpistrat bench corrupt -n 3 --kind weight prog.py

    The arguments after SUBJECT belong to it: see `mpistrat bench SUBJECT --help`.
    """
    sys.exit(importlib.import_module(f"mpistrat.bench.{subject}").main(list(arguments)))
