"""What bounds an all-reduce, and what the cases of a report are called."""

from __future__ import annotations

from collections.abc import Sequence

PLAIN, BUFFERS, BOUND = "plain array", "buffer", "bound"
COPY, WIRE = "a copy in memory", "the wire"


def least_bytes(ranks_per_node: Sequence[int], nbytes: int) -> float:
    """Return the bytes that every node has to send at least, or every rank where there is one node.

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
