"""Sizes as text."""

from __future__ import annotations

import argparse
import re

_BYTES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size(text: str) -> int:
    """Return the bytes of a size with a unit.

    >>> size("64KiB")
    65536
    """
    found = re.fullmatch(r"(\d+)\s*([KMG]iB|B|)", text)
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive number of bytes, such as 64KiB, not {text!r}")
    return int(found[1]) * _BYTES[found[2]]


def sizes(text: str) -> list[int]:
    """Return the bytes of sizes separated by commas.

    >>> sizes("4KiB,1MiB")
    [4096, 1048576]
    """
    return [size(part) for part in text.split(",")]


def in_words(nbytes: int) -> str:
    """Return a size in the largest unit that divides it.

    >>> in_words(1 << 20), in_words(1000)
    ('1 MiB', '1000 B')
    """
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes % _BYTES[unit] == 0:
            return f"{nbytes // _BYTES[unit]} {unit}"
    return f"{nbytes} B"
