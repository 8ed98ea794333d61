"""Division of a dataset over the replicas: one class per policy, with the number of steps known beforehand."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from mpistrat.data.options import AUTOTUNE, INFINITE_CARDINALITY, MOST_PREFETCH, PREFETCH, AutoShardPolicy
from mpistrat.data.pipeline.plan import PipelinePlan
from mpistrat.data.pipeline.transforms import Batch, Shard, Skip, Take, Transform, length_of
from mpistrat.data.rows.contracts import Source
from mpistrat.data.rows.split import piece
from mpistrat.replicas import ReplicaGroup

MOST_IMBALANCE = 0.05


class Division:
    """A replica's part of a dataset.

    Attributes
    ----------
    name : str
        The policy.
    steps : int or None
        Number of steps of an epoch, equal on all replicas. None if the epoch is endless.
    plan : PipelinePlan
        The plan by which this replica reads.
    transforms : sequence of Transform
        The transforms of the whole dataset.
    source : Source
        The source of the whole dataset.
    replicas : ReplicaGroup
        The replicas that share the dataset.
    communicates : bool
        Whether `batch` is collective.
    """

    name: str
    communicates: ClassVar[bool] = False
    steps: int | None
    plan: PipelinePlan

    def __init__(self, source: Source, transforms: Sequence[Transform], replicas: ReplicaGroup):
        self.source, self.transforms = source, tuple(transforms)
        self.replicas = replicas

    @property
    def cardinality(self) -> int:
        """Number of steps, or `INFINITE_CARDINALITY`."""
        return INFINITE_CARDINALITY if self.steps is None else self.steps

    def rows(self, step: int, iteration: int) -> np.ndarray:
        """Return the numbers of the rows of the plan's source that this replica reads in a step."""
        raise TypeError(f"the rows of {self.source} have no numbers")

    def batch(self, step: int, iteration: int) -> Any:
        """Return the batch that this replica gets in a step."""
        return self.plan.read(self.rows(step, iteration))

    def batches(self, step: int, iteration: int, together: int) -> Iterator[list[Any]]:
        """Yield this replica's batches from a step on, in lists. Up to ``together`` are read at once."""
        return self.plan.lists(partial(self.rows, iteration=iteration), step, self.steps, together)

    def ahead(self, prefetch: int, kind: str = "cpu") -> tuple[int, int]:
        """Return how many lists of `batches` may wait, and how many batches are read at once.

        No list waits where the program makes the batches itself: small ones of rows in memory, unless it asked for
        read-ahead. Handing a list over to another thread takes as long as making it.
        """
        if self.plan.batch is None:
            return max(PREFETCH, prefetch), 1
        best = self.plan.together(self._most_rows())
        if self.plan.maps:  # they come one by one
            return PREFETCH if prefetch == AUTOTUNE else prefetch, max(1, min(best, MOST_PREFETCH))
        most = min(max(PREFETCH, best), MOST_PREFETCH) if prefetch == AUTOTUNE else prefetch
        together = max(1, min(most if most <= PREFETCH else most // 2, best))
        if prefetch == AUTOTUNE and best > 1 and self.plan.in_memory and kind == "cpu":
            return 0, together
        return most // together, together

    def _most_rows(self) -> int:
        """Return the most rows of a batch that this replica gets; in a step it may get fewer, or none."""
        assert self.plan.batch is not None
        return self.plan.batch.size

    def rebuilt(self, transforms: Sequence[Transform], source: Any = None) -> Division:
        """Return the same division with other transforms, and perhaps another source of the same rows."""
        return type(self)(self.source if source is None else source, transforms, self.replicas)

    def after(self, rows: int) -> Division:
        """Return the division of an epoch without its first rows."""
        at = next(i for i, each in enumerate(self.transforms) if isinstance(each, Batch))
        return self.rebuilt((*self.transforms[:at], Skip(rows), *self.transforms[at:]))


class ByData(Division):
    """The division that cuts every global batch into one piece per replica."""

    name = "DATA"

    def __init__(self, source: Source, transforms: Sequence[Transform], replicas: ReplicaGroup):
        super().__init__(source, transforms, replicas)
        self.plan = PipelinePlan(source, transforms, source)
        self.steps = self.plan.length
        size, first = replicas.size, replicas.first
        self._cut = None if size == 1 else partial(piece, replicas=size, replica=first)

    def _most_rows(self) -> int:
        return -(-super()._most_rows() // self.replicas.size)

    def rows(self, step: int, iteration: int) -> np.ndarray:
        """Return the rows of this replica's piece of a global batch."""
        return self.plan.rows(step, iteration, self._cut)


class ByFile(Division):
    """The division that deals files to the replicas."""

    def __init__(
        self, source: Source, transforms: Sequence[Transform], replicas: ReplicaGroup, balance: bool = False
    ):
        super().__init__(source, transforms, replicas)
        self._balance = balance
        self.name = "FILE, balanced" if balance else "FILE"
        rows = source.file_rows()
        if not rows:
            raise ValueError(
                f"AutoShardPolicy.FILE needs a dataset of files, but this one is made of {source}: "
                "use AutoShardPolicy.DATA"
            )
        if len(rows) < replicas.size:
            raise ValueError(
                f"AutoShardPolicy.FILE needs at least one file per replica, but there are {len(rows)} files "
                f"with rows for {replicas.size} replicas: use AutoShardPolicy.DATA, or split the files "
                "(mpistrat shard)"
            )
        if _global_batch(transforms) < replicas.size:
            raise ValueError(
                "AutoShardPolicy.FILE needs a row of every global batch for each replica, but "
                f"batch({_global_batch(transforms)}) is shared by {replicas.size} replicas: use a larger batch, or "
                "AutoShardPolicy.DATA"
            )
        dealt = deal(rows, replicas.size, balance)
        lengths = [
            length_of(sum(rows[i] for i in mine), _of_share(transforms, replicas.size, replica))
            for replica, mine in enumerate(dealt)
        ]
        self.steps = _longest(lengths)
        self.plan = PipelinePlan(
            source.of_files(dealt[replicas.first]),
            _of_share(transforms, replicas.size, replicas.first),
            source,
        )

    def rebuilt(self, transforms: Sequence[Transform], source: Any = None) -> ByFile:
        """Return the same division of the files, with other transforms."""
        return ByFile(self.source if source is None else source, transforms, self.replicas, self._balance)

    def rows(self, step: int, iteration: int) -> np.ndarray:
        """Return the next rows of this replica's files, an empty array after the last."""
        return own_rows(self.plan, step, iteration)


class Everything(Division):
    """The division that gives every replica all rows, or all of its own ``shard(SHARD_HINT, SHARD_HINT)``."""

    name = "OFF"

    def __init__(self, source: Source, transforms: Sequence[Transform], replicas: ReplicaGroup):
        super().__init__(source, transforms, replicas)
        lengths = [
            length_of(source.length, self._of_replica(transforms, replicas.size, each))
            for each in range(replicas.size)
        ]
        longest = _longest(lengths)
        self.steps = None if longest is None else longest * replicas.size
        own = self._of_replica(transforms, replicas.size, replicas.first)
        self.plan = PipelinePlan(source, own, source)

    def _most_rows(self) -> int:
        return -(-super()._most_rows() // self.replicas.size)

    def rows(self, step: int, iteration: int) -> np.ndarray:
        """Return the rows of the next piece of a global batch: all pieces of one batch, then those of the next."""
        number, part = divmod(step, self.replicas.size)
        rows = own_rows(self.plan, number, iteration)
        first, last = piece(len(rows), self.replicas.size, part)
        return rows[first:last]

    @staticmethod
    def _of_replica(transforms: Sequence[Transform], size: int, replica: int) -> list[Transform]:
        return list(transforms)


class ByHint(Everything):
    """The division `Everything`, with the hints of ``shard`` replaced by the replicas' numbers."""

    name = "HINT"

    @staticmethod
    def _of_replica(transforms: Sequence[Transform], size: int, replica: int) -> list[Transform]:
        return with_hints(transforms, size, replica)


class OwnDataset(Division):
    """The division of datasets that the replicas made themselves, each in batches of its own size."""

    name = "its own"

    def __init__(
        self, source: Source, transforms: Sequence[Transform], replicas: ReplicaGroup, steps: int | None
    ):
        super().__init__(source, transforms, replicas)
        self.plan = PipelinePlan(source, transforms)
        self.steps = steps

    def rebuilt(self, transforms: Sequence[Transform], source: Any = None) -> OwnDataset:
        """Return the same division with other transforms, and perhaps another source of the same rows."""
        return OwnDataset(self.source if source is None else source, transforms, self.replicas, self.steps)

    def rows(self, step: int, iteration: int) -> np.ndarray:
        """Return the rows of the next batch of this replica's dataset, an empty array after the last."""
        return own_rows(self.plan, step, iteration)


def divide(
    policy: AutoShardPolicy,
    source: Source,
    transforms: Sequence[Transform],
    replicas: ReplicaGroup,
    balance: bool,
) -> Division:
    """Return the division that a policy asks for.

    Raises
    ------
    ValueError
        On every replica, if the policy does not suit the dataset.
    """
    return _DIVISIONS[policy](source, transforms, replicas, balance)


def deal(rows: Sequence[int], replicas: int, balance: bool) -> list[list[int]]:
    """Return the files of every replica.

    Files are dealt round-robin. With ``balance`` the longest file comes first, and each file goes to the
    replica with the fewest rows. That is the LPT rule of Graham, "Bounds on Multiprocessing Timing Anomalies"
    (1969). Its longest share is at most a third longer than the best possible one.

    Examples
    --------
    >>> deal([5, 1, 1, 3], 2, balance=False), deal([5, 1, 1, 3], 2, balance=True)
    ([[0, 2], [1, 3]], [[0], [1, 2, 3]])
    """
    if not balance:
        return [list(range(replica, len(rows), replicas)) for replica in range(replicas)]
    shares: list[list[int]] = [[] for _ in range(replicas)]
    # Where sums are equal, the replica with fewer files comes first, so that every replica gets a file.
    heap = [(0, 0, replica) for replica in range(replicas)]
    for file in sorted(range(len(rows)), key=lambda i: -rows[i]):
        total, count, replica = heap[0]
        shares[replica].append(file)
        heapq.heapreplace(heap, (total + rows[file], count + 1, replica))
    return [sorted(share) for share in shares]


def imbalance(rows: Sequence[int], replicas: int, balance: bool) -> float:
    """Return by what fraction the longest share of files is longer than the mean.

    Examples
    --------
    >>> imbalance([6, 1, 1], 2, balance=False), imbalance([6, 1, 1], 2, balance=True)
    (0.75, 0.5)
    """
    longest = max(sum(rows[i] for i in mine) for mine in deal(rows, replicas, balance))
    return longest * replicas / sum(rows) - 1


def with_hints(transforms: Sequence[Transform], size: int, replica: int) -> list[Transform]:
    """Return the transforms with the hints of ``shard`` replaced by a replica's numbers."""
    return [Shard(size, replica) if isinstance(each, Shard) and each.is_hint else each for each in transforms]


def own_rows(plan: PipelinePlan, step: int, iteration: int) -> np.ndarray:
    """Return the rows of batch ``step`` of a plan, an empty array after the last."""
    if plan.length is not None and step >= plan.length:
        return plan.locate(np.empty(0, np.int64), iteration)
    return plan.rows(step, iteration)


def _automatic(
    source: Source, transforms: Sequence[Transform], replicas: ReplicaGroup, balance: bool
) -> Division:
    """Return the FILE division if it keeps the rows and, nearly, the number of steps; otherwise DATA."""
    rows = source.file_rows()
    # Under FILE, take, skip and shard would count the rows of each replica's own files.
    if replicas.size == 1 or not rows or any(isinstance(each, (Take, Skip, Shard)) for each in transforms):
        return ByData(source, transforms, replicas)
    why = ""
    if len(rows) < replicas.size:
        why = f"there are {len(rows)} files with rows for {replicas.size} replicas"
    elif _global_batch(transforms) < replicas.size:
        why = f"a batch of {_global_batch(transforms)} rows is shared by {replicas.size} replicas"
    elif (excess := imbalance(rows, replicas.size, balance)) > MOST_IMBALANCE:
        why = f"one replica would have {excess:.0%} more rows than the mean"
    if not why:
        return ByFile(source, transforms, replicas, balance)
    if replicas.is_chief:
        warnings.warn(
            f"AutoShardPolicy.AUTO divides every batch instead of the files (DATA), because {why}; "
            "set AutoShardPolicy.DATA to do the same without this warning",
            UserWarning,
            stacklevel=2,
        )
    return ByData(source, transforms, replicas)


_Divide = Callable[[Source, Sequence[Transform], ReplicaGroup, bool], Division]
_DIVISIONS: dict[AutoShardPolicy, _Divide] = {
    AutoShardPolicy.AUTO: _automatic,
    AutoShardPolicy.DATA: lambda source, transforms, replicas, _: ByData(source, transforms, replicas),
    AutoShardPolicy.FILE: ByFile,
    AutoShardPolicy.HINT: lambda source, transforms, replicas, _: ByHint(source, transforms, replicas),
    AutoShardPolicy.OFF: lambda source, transforms, replicas, _: Everything(source, transforms, replicas),
}


def _global_batch(transforms: Sequence[Transform]) -> int:
    return next(each.size for each in transforms if isinstance(each, Batch))


def _of_share(transforms: Sequence[Transform], size: int, replica: int) -> list[Transform]:
    shared = []
    for each in transforms:
        if isinstance(each, Batch):
            first, last = piece(each.size, size, replica)
            each = replace(each, size=last - first)
        shared.append(each)
    return shared


def _longest(lengths: Sequence[int | None]) -> int | None:
    finite = [length for length in lengths if length is not None]
    return max(finite) if len(finite) == len(lengths) else None
