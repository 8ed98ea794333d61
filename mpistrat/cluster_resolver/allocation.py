"""The nodes that a scheduler gave a job, and what follows from them for the ranks that a launcher started there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Allocation:
    """Nodes that a job may use.

    Attributes
    ----------
    nodes : tuple of str
        Their names, in the scheduler's order.
    variable : str
        The variable they were read from.
    slots : tuple of int or None
        How many ranks the scheduler expects on each, None if it does not say.
    slots_variable : str
        The variable that says it, if it is another one.
    all_used : bool
        Whether every one of them is known to have ranks.
    """

    nodes: tuple[str, ...]
    variable: str
    slots: tuple[int, ...] | None = None
    slots_variable: str = ""
    all_used: bool = False

    def ranks_per_node(
        self, size: int, local_size: int | None, node: int | None
    ) -> tuple[tuple[int, ...], str] | None:
        """How many of ``size`` ranks are on each node, and what that follows from; None if it does not.

        Parameters
        ----------
        size : int
            The number of ranks.
        local_size, node : int or None
            How many ranks one of the nodes has, and which one that is.

        Examples
        --------
        >>> Allocation(("a", "b", "c"), "PBS_NODEFILE", slots=(3, 1, 1)).ranks_per_node(5, 1, 2)
        ((3, 1, 1), 'PBS_NODEFILE')
        >>> Allocation(("a", "b", "c"), "SLURM_JOB_NODELIST").ranks_per_node(6, 2, 0)
        ((2, 2, 2), 'SLURM_JOB_NODELIST, evenly')
        >>> Allocation(("a", "b", "c"), "SLURM_JOB_NODELIST").ranks_per_node(4, 2, 0)  # on two nodes, or on three
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
    """The allocation that names each node once for every slot; None if it names none.

    Examples
    --------
    >>> from_lines(["a", "a", "b"], "PBS_NODEFILE").slots
    (2, 1)
    """
    counts = Counter(hosts)
    return Allocation(tuple(counts), variable, tuple(counts.values())) if counts else None


def _filled(slots: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The ranks per node if one node after the other is filled."""
    counts = []
    for each in slots:
        counts.append(min(each, size))
        size -= counts[-1]
    return tuple(counts)
