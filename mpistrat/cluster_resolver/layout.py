"""The nodes that a scheduler gave to a job, and how the ranks are spread over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Allocation:
    """The nodes that a job may use."""

    nodes: tuple[str, ...]  # names of the nodes, in the scheduler's order
    variable: str  # variable that the nodes were read from
    # number of ranks that the scheduler expects on each node; None if it does not say
    slots: tuple[int, ...] | None = None
    slots_variable: str = ""  # variable that the slots were read from; empty if it is ``variable``
    all_used: bool = False  # whether every node is known to have ranks

    def ranks_per_node(self, size: int, local_size: int | None, node: int | None) -> tuple[tuple[int, ...], str] | None:
        """Return the number of ranks on each node and its source, or None if the variables do not tell.

        There are ``size`` ranks, of which ``local_size`` are on the node of the index ``node``.

        >>> Allocation(("a", "b", "c"), "PBS_NODEFILE", slots=(3, 1, 1)).ranks_per_node(5, 1, 2)
        ((3, 1, 1), 'PBS_NODEFILE')
        >>> Allocation(("a", "b", "c"), "SLURM_JOB_NODELIST").ranks_per_node(6, 2, 0)
        ((2, 2, 2), 'SLURM_JOB_NODELIST, evenly')
        >>> Allocation(("a", "b", "c"), "SLURM_JOB_NODELIST").ranks_per_node(4, 2, 0)  # two nodes or three?
        """
        for counts, why in self._candidates(size, local_size):
            known = local_size is not None and node is not None
            if sum(counts) == size and all(counts) and not (known and counts[node or 0] != local_size):
                return counts, why
        return None

    def _candidates(self, size: int, local_size: int | None) -> list[tuple[tuple[int, ...], str]]:
        found = []
        if self.slots is not None:
            variable = self.slots_variable or self.variable
            found.append((self.slots, variable))
            if self.all_used:
                found.append((_filled(self.slots, size), variable))
        if local_size is not None and (self.slots is None or len(set(self.slots)) == 1):
            found.append(((local_size,) * len(self.nodes), f"{self.variable}, evenly"))
        return found


def from_lines(hosts: list[str], variable: str) -> Allocation | None:
    """Return the allocation of a list that names each node once per slot, or None if the list is empty."""
    counts = Counter(hosts)
    return Allocation(tuple(counts), variable, tuple(counts.values())) if counts else None


def _filled(slots: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the number of ranks on each node if nodes are filled one after the other."""
    counts = []
    for each in slots:
        counts.append(min(each, size))
        size -= counts[-1]
    return tuple(counts)


def block(counts: Sequence[int]) -> list[int]:
    """Return the node of each rank if nodes are filled one after the other.

    >>> block([3, 1, 1])
    [0, 0, 0, 1, 2]
    """
    return [node for node, count in enumerate(counts) for _ in range(count)]


def plane(counts: Sequence[int], size: int) -> list[int]:
    """Return the node of each rank if nodes that have room get ``size`` ranks in turn.

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


def ranks_on(node_of_rank: Sequence[int], node: int) -> list[int]:
    """Return the ranks of a node.

    >>> ranks_on([0, 1, 2, 0, 0], 0)
    [0, 3, 4]
    """
    return [rank for rank, each in enumerate(node_of_rank) if each == node]


def local_rank(node_of_rank: Sequence[int], rank: int) -> int:
    """Return the index of a rank among those of its node."""
    return ranks_on(node_of_rank, node_of_rank[rank]).index(rank)
