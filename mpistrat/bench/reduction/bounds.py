"""The lower bound of an all-reduce, and the names of cases in a report."""

from __future__ import annotations

from collections.abc import Sequence

PLAIN, BUFFERS, BOUND = "plain array", "buffer", "bound"
COPY, WIRE = "a copy in memory", "the wire"


def least_bytes(ranks_per_node: Sequence[int], nbytes: int) -> float:
    """Return the minimum of bytes that every node must send, or every rank of a single node.

    Patarasuk and Yuan 2009, theorem 1.

    Examples
    --------
    >>> least_bytes((2, 2, 2, 2), 1000)
    1500.0
    >>> least_bytes((2,), 1000)
    1000.0
    """
    parts = len(ranks_per_node) if len(ranks_per_node) > 1 else ranks_per_node[0]
    return 2 * (parts - 1) / parts * nbytes
