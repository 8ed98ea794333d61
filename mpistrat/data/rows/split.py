"""Pieces of a global batch, one per replica."""

from __future__ import annotations

from typing import Any


def piece(n: int, replicas: int, replica: int) -> tuple[int, int]:
    """Return the first row of a replica's piece of ``n`` rows, and one past the last.

    Pieces are contiguous. The first ``n % replicas`` pieces have one row more than the others.

    Examples
    --------
    >>> [piece(7, 3, r) for r in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    size, longer = divmod(n, replicas)
    first = replica * size + min(replica, longer)
    return first, first + size + (replica < longer)


def pieces(n: int, replicas: int, block: range) -> tuple[int, int]:
    """Return the first row of the pieces of consecutive replicas, and one past the last.

    `part_of` finds the piece of one of them among the rows between.

    Examples
    --------
    >>> pieces(7, 3, range(1, 3)), part_of([3, 4, 5, 6], 2, 0)
    ((3, 7), [3, 4])
    """
    return piece(n, replicas, block[0])[0], piece(n, replicas, block[-1])[1]


def part_of(rows: Any, replicas: int, replica: int) -> Any:
    """Return a replica's piece of rows; None for None."""
    return None if rows is None else rows[slice(*piece(len(rows), replicas, replica))]
