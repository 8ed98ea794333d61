"""The replicas of a strategy, and the ranks that play them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from mpistrat.representation import grouped
from mpistrat.runtime.topology import Topology


class ReplicaGroup:
    """The replicas of a strategy, dealt to ranks in blocks of consecutive numbers.

    A *rank* is a process. A *replica* is a copy of the model, and what a step counts. Code that divides a batch, a mean
    or a sum asks this object; code that communicates asks `Topology`.

    ``blocks`` are the replicas of each rank, by default the replica of its own number: then ``by_rank`` is True. Ranks
    with equal blocks play one replica together. ``topology`` has the ranks of one position in it, the first position if
    ``is_first``. ``is_virtual`` says whether ``size``, the number of replicas, was chosen apart from the number of
    ranks: results must not depend on the latter. ``local`` are the ``count`` replicas from ``first`` on of this rank.
    ``is_chief`` says whether this rank writes files and reports. Raise ValueError if the blocks do not make up replicas
    0, 1, 2, ... without a gap.

    >>> from mpistrat.runtime.topology import SingleRankTopology
    >>> group = ReplicaGroup(SingleRankTopology(), [range(4)])
    >>> group.size, group.first, group.count, group.rank_of(3)
    (4, 0, 4, 0)
    """

    def __init__(
        self, topology: Topology, blocks: Sequence[range] | None = None, is_virtual: bool = False, is_first: bool = True
    ):
        if blocks is None:
            blocks = [range(rank, rank + 1) for rank in range(topology.size)]
        if len(blocks) != topology.size:
            raise ValueError(f"{len(blocks)} blocks of replicas for {topology.size} ranks: give each rank one")
        ranks = grouped((block, rank) for rank, block in enumerate(blocks))
        dealt = sorted(ranks, key=lambda block: block.start)
        if not all(dealt) or [*chain(*dealt)] != [*range(dealt[-1].stop)]:
            raise ValueError(f"blocks must make up the replicas 0, 1, 2, ... without a gap, not {dealt}")
        self.local = local = blocks[topology.rank]
        self.blocks = tuple(blocks)
        self._first_ranks = [ranks[block][0] for block in dealt for _ in block]
        self.size: int = len(self._first_ranks)
        self.first, self.count = local.start, len(local)
        self.by_rank = all(block == range(rank, rank + 1) for rank, block in enumerate(blocks))
        self.is_virtual = is_virtual
        self.is_chief = is_first and topology.rank == self.rank_of(0)

    @classmethod
    def dealt(cls, topology: Topology, size: int, *, is_virtual: bool = True) -> ReplicaGroup:
        """Deal ``size`` replicas to the ranks, in blocks whose lengths differ by one at most, consecutive on a node.

        Raise ValueError if there are fewer replicas than ranks.
        """
        ranks = topology.size
        if size < ranks:
            raise ValueError(f"{size} replicas for {ranks} ranks: each plays one or more; start fewer, or ask for more")
        blocks = [range(0)] * ranks
        for position, rank in enumerate(chain(*topology.nodes)):
            blocks[rank] = range(position * size // ranks, (position + 1) * size // ranks)
        return cls(topology, blocks, is_virtual=is_virtual)

    def rank_of(self, replica: int) -> int:
        """Return the first rank that plays a replica: the one that sends or receives its values."""
        return self._first_ranks[replica]

    def checked(self, name: str, replica: object) -> int:
        """Return the number of a replica, the argument ``name``. Raise TypeError for no int, ValueError for another."""
        if isinstance(replica, bool) or not isinstance(replica, (int, np.integer)):
            raise TypeError(f"{name} must be the number of a replica, not {replica!r}")
        if not 0 <= replica < self.size:
            raise ValueError(f"{name} must be one of the replicas 0 to {self.size - 1}, not {replica}")
        return int(replica)  # ranks compare it: one may give a NumPy scalar

    def __repr__(self) -> str:
        numbers = f"{self.first}" if self.count == 1 else f"{self.first}-{self.first + self.count - 1}"
        return f"<ReplicaGroup: {numbers} of {self.size} replicas>"


def random_stream(seed: int | Sequence[int], replica: int) -> np.random.Generator:
    """Return a replica's PCG64, seeded by ``SeedSequence(seed, spawn_key=(replica,))``. See `Strategy.rng`.

    Examples
    --------
    >>> from mpistrat.replicas import random_stream
    >>> [int(random_stream(7, replica).integers(100)) for replica in (0, 1)]
    [30, 68]
    """
    numbers: Sequence[Any] = seed if isinstance(seed, (list, tuple)) else [seed]
    if not numbers or not all(isinstance(number, (int, np.integer)) for number in numbers):
        raise TypeError(f"seed must be an int or a list of ints, the same on every replica, not {seed!r}")
    if min(numbers) < 0:
        raise ValueError(f"seed must not be negative, not {seed!r}")
    sequence = np.random.SeedSequence([int(number) for number in numbers], spawn_key=(replica,))
    return np.random.Generator(np.random.PCG64(sequence))
