"""The node of each rank, from the number of ranks of each node and the order in which they are dealt out."""

from __future__ import annotations

from collections.abc import Sequence


def block(counts: Sequence[int]) -> list[int]:
    """Return the node of each rank if nodes are filled one after the other.

    Examples
    --------
    >>> block([3, 1, 1])
    [0, 0, 0, 1, 2]
    """
    return [node for node, count in enumerate(counts) for _ in range(count)]


def plane(counts: Sequence[int], size: int) -> list[int]:
    """Return the node of each rank if nodes that have room get ``size`` ranks in turn.

    Examples
    --------
    >>> plane([3, 1], 2)
    [0, 0, 1, 0]
    """
    left = list(counts)
    nodes: list[int] = []
    while any(left):
        for node, room in enumerate(left):
            taken = min(room, size)
            nodes += [node] * taken
            left[node] -= taken
    return nodes


def cyclic(counts: Sequence[int]) -> list[int]:
    """Return the node of each rank if nodes that have room get one rank in turn.

    Examples
    --------
    >>> cyclic([3, 1, 1])
    [0, 1, 2, 0, 0]
    """
    return plane(counts, 1)


def ranks_on(node_of_rank: Sequence[int], node: int) -> list[int]:
    """Return the ranks of a node.

    Examples
    --------
    >>> ranks_on([0, 1, 2, 0, 0], 0)
    [0, 3, 4]
    """
    return [rank for rank, each in enumerate(node_of_rank) if each == node]


def local_rank(node_of_rank: Sequence[int], rank: int) -> int:
    """Return the index of a rank among those of its node."""
    return ranks_on(node_of_rank, node_of_rank[rank]).index(rank)
