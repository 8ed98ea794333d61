"""Pieces of a global batch, one per replica."""

from __future__ import annotations


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
