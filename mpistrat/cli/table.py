"""Tables that can be read in a terminal and in the log of a job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console


def counted(number: int, thing: str) -> str:
    """Return a number and its noun, in the plural unless the number is 1.

    >>> counted(1, "file"), counted(1200, "file")
    ('1 file', '1,200 files')
    """
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Return a text without the characters by which a file could command a terminal.

    >>> printable("a" + chr(27) + "[2Jb" + chr(10))
    'a?[2Jb\\n'
    """
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


def echo(text: str = "", err: bool = False) -> None:
    """Print a text that may hold names of files and of objects in files."""
    click.echo(printable(text), err=err)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table. The cells of a column begin below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{a:<{b}}" for a, b in zip(row, widths, strict=True)).rstrip() for row in rows]


def console() -> Console:
    """Return the console for tables: without a terminal it has no colours and 140 columns."""
    from rich.console import Console

    try:
        columns = os.get_terminal_size(1).columns  # 0 in the pseudo-terminal that a launcher gives its ranks
    except OSError:
        columns = 0
    if columns:
        return Console(highlight=False)
    return Console(width=140, highlight=False, force_terminal=False, no_color=True)


def three_digits(number: float) -> str:
    """Return a number rounded to three digits, without an exponent.

    >>> three_digits(0.01234), three_digits(999.9), three_digits(1234.5)
    ('0.0123', '1000', '1230')
    """
    return f"{float(f'{number:.3g}'):.15g}"


def amount(nbytes: float) -> str:
    """Return a number of bytes in three digits and its unit.

    >>> amount(1_234_567)
    '1.23 MB'
    """
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{three_digits(nbytes)} {unit}"
        nbytes /= 1000
    return f"{three_digits(nbytes)} GB"
