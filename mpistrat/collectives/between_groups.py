"""The exchanges between groups of ranks, where each group is in sync by itself."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays.arrays import as_bytes
from mpistrat.collectives import structures
from mpistrat.collectives.compression import LossyCompression
from mpistrat.collectives.movement.moves import all_gather, all_gather_parts
from mpistrat.collectives.ops.default import CollectiveAllReduce
from mpistrat.collectives.options import CommunicationOptions
from mpistrat.process import mpi
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.runtime.topology import Slot, Topology
from mpistrat.values import ReduceOp

_NAME = "groups"
_Places = tuple[tuple[int, int], ...]


class _Rails(Slot, dict[_Places, Any]):
    """The rail of this rank for each division into groups: a strategy of equal groups takes the one that was made.

    A key has the first rank of the group, and the place in it, of each rank. Strategies end without a collective call,
    so none of them can free a communicator: rails are freed with the communicator of all ranks.
    """

    def are_in_step(self, division: _Places) -> bool:
        """Return whether there is such a division, and no error has left a collective of this rank's rail."""
        rail = self.get(division)
        return division in self and not (rail and Topology.of(rail).lock.given_up)

    def close(self) -> None:
        for rail in filter(None, self.values()):
            rail.Free()
        self.clear()


class BetweenGroups:
    """The groups of a strategy, how often they exchange, and by which ranks.

    Ranks of one place in their groups make a rail. Each rail carries the arrays that it owns, so that all links of a
    node work, and none carries an array twice. Ranks beyond the smallest group own none.

    Collective over ``everyone``. ``group`` are the ranks of this one. ``sync_every`` is the number of steps between two
    exchanges. Raise MismatchError on every rank if ``sync_every``, ``compression`` or ``outer`` differ, and
    ValueError if a group has ranks that are not among ``everyone``.

    This is group ``index`` of ``count``, with ``replicas_before`` replicas in groups of a smaller index, and ``weight``
    is its share of all ranks: of a mean over all rows. The first ``owners_in_group`` ranks of each group own arrays: as
    many as the smallest group has.
    """

    def __init__(
        self,
        group: Topology,
        everyone: Topology,
        sync_every: int,
        compression: LossyCompression | None,
        outer: Any,
        options: CommunicationOptions,
    ):
        config = {} if outer is None else outer.get_config()
        numbers = tuple((name, repr(value)) for name, value in config.items() if not callable(value))
        structures.agree(everyone, _NAME, sync_every, repr(compression), type(outer).__name__, numbers)
        self.group = group
        self.sync_every, self.compression, self.outer = sync_every, compression, outer
        first = group.broadcast_object(everyone.rank)
        division = tuple(everyone.all_gather_object((first, group.rank)))
        firsts = [rank for rank, _ in division]
        if not everyone.all_true(firsts.count(first) == group.size):
            raise ValueError("the ranks of a group must be among those of the strategy: give comm=mesh.parent")
        self.count, self.index = len(set(firsts)), sorted(set(firsts)).index(first)
        self.replicas_before = sum(rank < first for rank in firsts)
        self.weight = group.size / everyone.size
        self.owners_in_group = min(firsts.count(rank) for rank in firsts)
        rails = everyone.slot(_Rails)
        if not everyone.all_true(rails.are_in_step(division)):
            # Ranks beyond the smallest group have no partner in every group, so they get no rail.
            color = group.rank if group.rank < self.owners_in_group else mpi.start().UNDEFINED
            rails[division] = everyone.world.Split(color, key=everyone.rank)
        rail = rails[division]
        self._options, self._label = options, f"group {self.index} (rank {everyone.rank})"
        if rail:  # others have no rail, and own nothing
            self._rail = Topology.of(rail).limited(options.timeout_seconds)
            self._ops = CollectiveAllReduce().bound_to(self._rail)

    def owners(self, nbytes: Sequence[int]) -> list[int]:
        """Return which rank of a group owns each of several arrays: about the same number of bytes on each."""
        loads, owners = [0] * self.owners_in_group, [0] * len(nbytes)
        for i in sorted(range(len(nbytes)), key=lambda i: -nbytes[i]):
            owners[i] = loads.index(min(loads))
            loads[owners[i]] += nbytes[i]
        return owners

    def sums(self, values: list[np.ndarray]) -> list[np.ndarray]:
        """Add up arrays over the groups. Collective over the rail."""
        return self._ops.all_reduce(ReduceOp.SUM, values, self._options, _NAME) if values else []

    def concatenated(self, value: np.ndarray) -> np.ndarray:
        """Return the rows of all groups, in their order. Collective over the rail."""
        return all_gather(self._rail, value, 0, self._options.timeout_seconds)

    def compare(self, step: int, exchanged: Sequence[str], notes: Sequence[str]) -> list[set[str]]:
        """Return the notes of all groups on each thing that they exchange. Collective over the rail.

        Raise MismatchError if they do not exchange the same, after the same step.
        """
        if self.group.rank >= self.owners_in_group:
            return []
        reports = self._rail.all_gather_object((self._label, step, exchanged, notes))
        labels, steps, names, noted = zip(*reports, strict=True)
        wrong, shown = "give all the same number of steps", [f"step {number}" for number in steps]
        if len({*steps}) == 1:
            rows = itertools.zip_longest(*names, fillvalue="nothing more")
            wrong, shown = "train the same in all", next(([*row] for row in rows if len({*row}) > 1), [])
        if shown:
            lines = "".join(f"\n  {label}: {text}" for label, text in zip(labels, shown, strict=True))
            raise MismatchError(f"groups met in different exchanges: {wrong}{lines}")
        return [{*row} for row in zip(*noted, strict=True)]

    @contextlib.contextmanager
    def refusal(self) -> Iterator[None]:
        """Context in which an error of this rank raises on the other ranks of its group, when they come to `share`."""
        try:
            yield
        except Exception as error:
            structures.refuse(_NAME, self.group, error, self._options.timeout_seconds)
            raise

    def share(self, arrays: Sequence[np.ndarray], owners: Sequence[int]) -> None:
        """Copy each contiguous array from the rank that owns it to the other ranks of this group. Collective."""
        parts: list[list[np.ndarray]] = [[] for _ in range(self.group.size)]
        for array, owner in zip(arrays, owners, strict=True):
            parts[owner].append(as_bytes(array))
        if self.group.size > 1:
            all_gather_parts(self.group, parts, _NAME, self._options.timeout_seconds)
