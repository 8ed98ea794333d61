"""Pieces of a global batch, one per replica."""

from __future__ import annotations

from typing import Any


def piece(n: int, replicas: int, replica: int) -> tuple[int, int]:
    """Return first row and end of a replica's piece of ``n`` rows. The first ``n % replicas`` have one row more."""
    size, longer = divmod(n, replicas)
    first = replica * size + min(replica, longer)
    return first, first + size + (replica < longer)


def pieces(n: int, replicas: int, block: range) -> tuple[int, int]:
    """Return the first row of the pieces of consecutive replicas, and one past the last; `part_of` finds one."""
    return piece(n, replicas, block[0])[0], piece(n, replicas, block[-1])[1]


def part_of(rows: Any, replicas: int, replica: int) -> Any:
    """Return a replica's piece of rows; None for None."""
    return None if rows is None else rows[slice(*piece(len(rows), replicas, replica))]
