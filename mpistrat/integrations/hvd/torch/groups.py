"""The groups of gradients that are combined by one call each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor


def grouped(parameters: list[Tensor], groups: int | Sequence[Sequence[Tensor]] | None) -> list[list[Tensor]]:
    """Return parameters in groups, in an order that is equal on all ranks.

    Parameters
    ----------
    parameters : list of Tensor
    groups : int or sequence of sequences of Tensor, optional
        The number of groups, or the groups, to which parameters that are in none of them are added, one by one. By
        default one group.

    Raises
    ------
    ValueError
        If a parameter is in two groups.
    """
    if not groups:
        return [parameters] if parameters else []
    if isinstance(groups, int):
        ends = [len(parameters) * i // groups for i in range(groups + 1)]
        found = [parameters[first:last] for first, last in itertools.pairwise(ends)]
        return [each for each in found if each]
    place: dict[Tensor, int] = {}
    for number, group in enumerate(groups):
        for p in group:
            if not isinstance(p, Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if p in place:
                raise ValueError("A parameter can only appear once in groups.")
            place[p] = number
    lists: list[list[Tensor]] = [[] for _ in groups]
    alone = []
    for p in parameters:
        if p in place:
            lists[place[p]].append(p)
        else:
            alone.append([p])
    return [each for each in lists if each] + alone
