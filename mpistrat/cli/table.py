"""Tables that can be read in a terminal and in the log of a job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


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


def aligned(rows: Sequence[Sequence[str]], numbers: int = 0) -> list[str]:
    """Return the lines of a table. Cells of the first columns, which hold numbers, end below each other.

    >>> aligned([("rows", "file"), ("1", "a.h5"), ("12,000", "b.h5")], numbers=1)
    ['  rows  file', '     1  a.h5', '12,000  b.h5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{'>' if index < numbers else '<'}{width}" for index, width in enumerate(widths)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]


def grid(*columns: str, apart: bool = False, **options: Any) -> Table:
    """Return a table for a console that looks as `aligned` ones do, with rows of several lines ``apart``."""
    from rich.table import Table

    padding = (0, 2, int(apart), 0)
    return Table(*columns, box=None, pad_edge=False, padding=padding, header_style="bold", **options)


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


def duration(seconds: float) -> str:
    """Return seconds in three digits and their unit.

    >>> duration(2.5), duration(0.0123), duration(3.3e-6)
    ('2.5 s', '12.3 ms', '3.3 us')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds * 1e6)} us" if seconds else "0 s"


def text_of(value: Any) -> str:
    """Return the text of a cell: yes, no, an empty text, or the value."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
