"""How the replicas divide a dataset: one class for each way, each knowing its steps beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from mpistrat.data.contracts import Peers, Source
from mpistrat.data.options import AutoShardPolicy
from mpistrat.data.plan import Plan
from mpistrat.data.split import piece
from mpistrat.data.transforms import Batch, Shard, Transform, length_of


class Division(Protocol):
    """A replica's part of a dataset.

    Attributes
    ----------
    steps : int or None
        How many steps an epoch has, on every replica; None if it is endless.
    plan : Plan
        What the replica reads by.
    """

    steps: int | None
    plan: Plan

    def batch(self, step: int, iteration: int) -> Any:
        """What this replica gets in a step."""


class ByData:
    """Every global batch is cut into one piece per replica."""

    name: ClassVar[str] = "DATA"

    def __init__(self, source: Source, transforms: Sequence[Transform], peers: Peers):
        self.plan = Plan(source, transforms)
        self.steps = self.plan.length
        self._size, self._rank = peers.size, peers.rank

    def batch(self, step: int, iteration: int) -> Any:
        """This replica's piece of a global batch."""
        rows = self.plan.size(step, iteration)
        return self.plan.piece(step, *piece(rows, self._size, self._rank), iteration)


class ByFile:
    """Every replica has files of its own."""

    name: ClassVar[str] = "FILE"

    def __init__(self, source: Source, transforms: Sequence[Transform], peers: Peers):
        rows = source.file_rows()
        if not rows:
            raise ValueError(
                f"AutoShardPolicy.FILE needs a dataset of files, and this one is made of {source}: "
                "use AutoShardPolicy.DATA"
            )
        if len(rows) < peers.size:
            raise ValueError(
                f"AutoShardPolicy.FILE needs at least one file per replica, and there are {len(rows)} files "
                f"with rows for {peers.size} replicas: use AutoShardPolicy.DATA, or split the files"
            )
        global_batch = next(each.size for each in transforms if isinstance(each, Batch))
        if global_batch < peers.size:
            raise ValueError(
                "AutoShardPolicy.FILE needs a row of every global batch for each replica, and "
                f"batch({global_batch}) is shared by {peers.size} replicas: use a larger batch, or "
                "AutoShardPolicy.DATA"
            )
        lengths = [
            length_of(sum(rows[rank :: peers.size]), _of_share(transforms, peers.size, rank))
            for rank in range(peers.size)
        ]
        self.steps = _longest(lengths)
        self.plan = Plan(
            source.of_files(range(peers.rank, len(rows), peers.size)),
            _of_share(transforms, peers.size, peers.rank),
        )

    def batch(self, step: int, iteration: int) -> Any:
        """The next rows of this replica's files, none once they are used up."""
        return own_batch(self.plan, step, iteration)


class Everything:
    """Every replica goes through all rows, or all of its own ``shard(SHARD_HINT, SHARD_HINT)``."""

    name: ClassVar[str] = "OFF"

    def __init__(self, source: Source, transforms: Sequence[Transform], peers: Peers):
        lengths = [
            length_of(len(source), self._of_rank(transforms, peers.size, r)) for r in range(peers.size)
        ]
        longest = _longest(lengths)
        self.steps = None if longest is None else longest * peers.size
        self.plan = Plan(source, self._of_rank(transforms, peers.size, peers.rank))
        self._size = peers.size

    def batch(self, step: int, iteration: int) -> Any:
        """The next piece of a global batch: all pieces of one, then those of the next."""
        number, part = divmod(step, self._size)
        if self.plan.length is not None and number >= self.plan.length:
            return self.plan.empty()
        rows = self.plan.size(number, iteration)
        return self.plan.piece(number, *piece(rows, self._size, part), iteration)

    @staticmethod
    def _of_rank(transforms: Sequence[Transform], size: int, rank: int) -> list[Transform]:
        return list(transforms)


class ByHint(Everything):
    """`Everything`, with the hints of ``shard`` replaced by the replicas' numbers."""

    name: ClassVar[str] = "HINT"

    @staticmethod
    def _of_rank(transforms: Sequence[Transform], size: int, rank: int) -> list[Transform]:
        return [
            Shard(size, rank) if isinstance(each, Shard) and each.is_hint else each for each in transforms
        ]


DIVISIONS: dict[AutoShardPolicy, type[ByData] | type[ByFile] | type[Everything]] = {
    AutoShardPolicy.AUTO: ByData,
    AutoShardPolicy.DATA: ByData,
    AutoShardPolicy.FILE: ByFile,
    AutoShardPolicy.HINT: ByHint,
    AutoShardPolicy.OFF: Everything,
}


class Own:
    """Every replica has a dataset of its own, of batches of the size that it wants."""

    def __init__(self, plan: Plan, steps: int | None):
        self.plan = plan
        self.steps = steps

    def batch(self, step: int, iteration: int) -> Any:
        """The next batch of this replica's dataset, an empty one after the last."""
        return own_batch(self.plan, step, iteration)


def own_batch(plan: Plan, step: int, iteration: int) -> Any:
    """Batch ``step`` of a plan, an empty one after the last."""
    if plan.length is not None and step >= plan.length:
        return plan.empty()
    return plan.whole(step, iteration)


def _of_share(transforms: Sequence[Transform], size: int, rank: int) -> list[Transform]:
    shared = []
    for each in transforms:
        if isinstance(each, Batch):
            first, last = piece(each.size, size, rank)
            each = replace(each, size=last - first)
        shared.append(each)
    return shared


def _longest(lengths: Sequence[int | None]) -> int | None:
    finite = [length for length in lengths if length is not None]
    return max(finite) if len(finite) == len(lengths) else None
