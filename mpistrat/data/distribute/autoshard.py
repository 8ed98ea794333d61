"""Division of a dataset over the replicas: one class per policy, with the number of steps known beforehand.

A *pipeline* reads for some replicas. With ``virtual_replicas`` each replica has its own, so that the rows of a replica
do not depend on the number of ranks. Otherwise each rank has one, and deals its batches to its replicas in turn.
"""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpistrat import nest
from mpistrat.data.options import AUTOTUNE, INFINITE_CARDINALITY, MOST_PREFETCH, PREFETCH, AutoShardPolicy
from mpistrat.data.pipeline.definition import seeds_of, with_seeds
from mpistrat.data.pipeline.plan import PipelinePlan, in_a_list
from mpistrat.data.pipeline.transforms import Batch, Shard, Skip, Take, Transform, length_of
from mpistrat.data.rows.contracts import Source
from mpistrat.data.rows.split import part_of, pieces
from mpistrat.replicas import ReplicaGroup
from mpistrat.values import PerReplica

MOST_IMBALANCE = 0.05


class Reading(NamedTuple):
    """A plan that reads for some replicas of this rank.

    Attributes
    ----------
    plan : PipelinePlan or StreamPlan
    fed : int
        For how many replicas.
    rows : callable
        ``rows(k, iteration)`` are those of batch ``k``, which replica ``k % fed`` gets in step ``k // fed``.
    """

    plan: Any
    fed: int
    rows: Callable[..., Any]

    def of_step(self, step: int, iteration: int) -> list[Any]:
        """Return the rows of the batches of a step."""
        return [self.rows(k, iteration) for k in range(step * self.fed, (step + 1) * self.fed)]


def pipelines_of(replicas: ReplicaGroup, per_replica: bool = False) -> list[range]:
    """Return the replicas that each input pipeline feeds.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> replicas = ReplicaGroup(SimpleNamespace(size=2, rank=0), [range(2), range(2, 5)])
    >>> pipelines_of(replicas), len(pipelines_of(replicas, per_replica=True))
    ([range(0, 2), range(2, 5)], 5)
    """
    if replicas.is_virtual or per_replica:
        return [range(each, each + 1) for each in range(replicas.size)]
    blocks = {replicas.block_of(replicas.rank_of(each)) for each in range(replicas.size)}
    return sorted(blocks, key=lambda block: block.start)


class Division:
    """The part of a dataset that the replicas of a rank get.

    Attributes
    ----------
    name : str
        The policy.
    steps : int or None
        Number of steps of an epoch, equal on all replicas. None if the epoch is endless.
    readings : sequence of Reading
        The plans by which this rank reads for its replicas, in the order of replicas.
    plan : PipelinePlan
        The first of them.
    transforms : sequence of Transform
        The transforms of the whole dataset.
    source : Source
        The source of the whole dataset.
    replicas : ReplicaGroup
        The replicas that share the dataset.
    pipelines : list of range
        The replicas that each pipeline feeds.
    communicates : bool
        Whether `batch` is collective.
    """

    name: str
    communicates: ClassVar[bool] = False
    steps: int | None
    readings: Sequence[Reading]
    _rows: Callable[..., Any]

    def __init__(self, source: Source, transforms: Sequence[Transform], replicas: ReplicaGroup):
        self.source: Any = source
        self.transforms = tuple(transforms)
        self.replicas, self.pipelines = replicas, pipelines_of(replicas)

    @property
    def plan(self) -> Any:
        """The first plan by which this rank reads."""
        return self.readings[0].plan

    @property
    def local(self) -> list[tuple[int, range]]:
        """The pipelines of this rank: the number of each, and the replicas that it feeds."""
        return [each for each in enumerate(self.pipelines) if each[1].start in self.replicas.local]

    def _read_by(self, plans: Iterable[Any]) -> list[Reading]:
        """Return how the pipelines of this rank read, by these plans."""
        fed = [len(block) for _, block in self.local]
        return [Reading(plan, n, partial(self._rows, plan, n)) for plan, n in zip(plans, fed, strict=True)]

    @property
    def cardinality(self) -> int:
        """Number of steps, or `INFINITE_CARDINALITY`."""
        return INFINITE_CARDINALITY if self.steps is None else self.steps

    def batch(self, step: int, iteration: int) -> Any:
        """Return the batch of a step: that of the one replica of this rank, or a structure of PerReplica values."""
        made = [each.plan.read_each(each.of_step(step, iteration)) for each in self.readings]
        return self.formed([*chain(*made)])

    def batches(self, step: int, iteration: int, together: int) -> Iterator[list[Any]]:
        """Yield the batches from a step on, in lists. Up to ``together`` are read at once."""
        lists = [
            plan.lists(partial(rows, iteration=iteration), step, self.steps, together, fed)
            for plan, fed, rows in self.readings
        ]
        return lists[0] if self._bare else self._by_step(lists, step, together)

    def _by_step(self, lists: Sequence[Iterator[list[Any]]], step: int, together: int) -> Iterator[list[Any]]:
        """Yield the batches of all plans, step by step, in lists that grow as theirs."""
        # Each plan makes the batches of its replicas one after another, so a step takes so many of each.
        streams = [
            [chain.from_iterable(made)] * each.fed for made, each in zip(lists, self.readings, strict=True)
        ]
        steps = map(self.formed, zip(*chain(*streams), strict=False))
        size, most = 1, 1 if self.plan.maps else together
        while self.steps is None or step < self.steps:
            yield from in_a_list(islice(steps, size))
            step, size = step + size, min(2 * size, most)

    @property
    def _bare(self) -> bool:
        """Whether a batch is that of the one replica of this rank. With virtual replicas none depends on the ranks."""
        return self.replicas.count == 1 and not self.replicas.is_virtual

    def formed(self, batches: Sequence[Any]) -> Any:
        """Return the batches of the replicas of this rank as the program gets them, with PerReplica values as leaves.

        Raises
        ------
        ValueError
            If their structures differ.
        """
        if self._bare:
            return batches[0]
        leaves, rebuild = nest.flatten(batches[0])
        columns = [leaves, *(nest.flatten(each)[0] for each in batches[1:])]
        if len({*map(len, columns)}) > 1:
            raise ValueError(
                f"the batches of replicas {[*self.replicas.local]} have {[*map(len, columns)]} arrays: let dataset_fn "
                "return datasets of the same structure"
            )
        return rebuild([PerReplica(each) for each in zip(*columns, strict=True)])

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
        """Return the most rows that the first plan reads in a step; it may be fewer, or none."""
        assert self.plan.batch is not None
        return self.plan.batch.size

    def rebuilt(self, transforms: Sequence[Transform], source: Any = None) -> Division:
        """Return the same division with other transforms, and perhaps another source of the same rows."""
        return type(self)(self.source if source is None else source, transforms, self.replicas)

    def described(self) -> dict[str, Any]:
        """Return what a state says of the dataset, and must be equal to restore it."""
        return described(self.source, self.transforms)

    def with_seeds(self, seeds: Sequence[int]) -> Division:
        """Return the same division with other seeds."""
        source, transforms = with_seeds(self.source, self.transforms, seeds)
        return self.rebuilt(transforms, source)

    def after(self, rows: int) -> Division:
        """Return the division of an epoch without its first rows."""
        at = next(i for i, each in enumerate(self.transforms) if isinstance(each, Batch))
        return self.rebuilt((*self.transforms[:at], Skip(rows), *self.transforms[at:]))


class ByData(Division):
    """The division that cuts every global batch into one piece per replica."""

    name = "DATA"

    def __init__(self, source: Source, transforms: Sequence[Transform], replicas: ReplicaGroup):
        super().__init__(source, transforms, replicas)
        plan = PipelinePlan(source, transforms, source)
        self.steps = plan.length
        size, local = replicas.size, replicas.local
        self._cut = None if len(local) == size else partial(pieces, replicas=size, block=local)
        alone = partial(plan.rows, cut=self._cut)
        rows = alone if replicas.count == 1 else partial(self._rows, plan, replicas.count)
        self.readings = [Reading(plan, replicas.count, rows)]

    def _most_rows(self) -> int:
        size = super()._most_rows()
        return min(size, self.replicas.count * -(-size // self.replicas.size))

    def _rows(self, plan: PipelinePlan, fed: int, k: int, iteration: int) -> np.ndarray:
        """Return a piece of a global batch. The pieces of this rank are consecutive, and found together."""
        return part_of(plan.rows(k // fed, iteration, self._cut), fed, k % fed)


class ByFile(Division):
    """The division that deals files to the pipelines."""

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
        fed = self.pipelines
        if why := _too_few(rows, len(fed), replicas):
            raise ValueError(
                f"AutoShardPolicy.FILE needs at least one file per replica, but {why}: use AutoShardPolicy.DATA, or "
                "split the files (mpistrat shard)"
            )
        if _global_batch(transforms) < replicas.size:
            raise ValueError(
                "AutoShardPolicy.FILE needs a row of every global batch for each replica, but "
                f"batch({_global_batch(transforms)}) is shared by {replicas.size} replicas: use a larger batch, or "
                "AutoShardPolicy.DATA"
            )
        dealt = deal(rows, len(fed), balance)
        shares = [_of_share(transforms, replicas.size, block) for block in fed]
        lengths = [
            length_of(sum(rows[i] for i in mine), share) for mine, share in zip(dealt, shares, strict=True)
        ]
        self.steps = _longest(lengths)
        self.readings = self._read_by(
            PipelinePlan(source.of_files(dealt[number]), shares[number], source) for number, _ in self.local
        )

    def rebuilt(self, transforms: Sequence[Transform], source: Any = None) -> ByFile:
        """Return the same division of the files, with other transforms."""
        return ByFile(self.source if source is None else source, transforms, self.replicas, self._balance)

    def _rows(self, plan: PipelinePlan, fed: int, k: int, iteration: int) -> np.ndarray:
        """Return the next rows of a pipeline's files, an empty array after the last."""
        return part_of(own_rows(plan, k // fed, iteration), fed, k % fed)


class Everything(Division):
    """The division that gives every pipeline all rows, or all of its own ``shard(SHARD_HINT, SHARD_HINT)``."""

    name = "OFF"

    def __init__(self, source: Source, transforms: Sequence[Transform], replicas: ReplicaGroup):
        super().__init__(source, transforms, replicas)
        number = len(self.pipelines)
        of_pipelines = [self._of_pipeline(transforms, number, each) for each in range(number)]
        longest = _longest([length_of(source.length, each) for each in of_pipelines])
        fewest = min(map(len, self.pipelines))  # replicas of a pipeline: it deals its batches last
        self.steps = None if longest is None else -(-longest * replicas.size // fewest)
        self.readings = self._read_by(
            PipelinePlan(source, of_pipelines[each], source) for each, _ in self.local
        )

    def _most_rows(self) -> int:
        return -(-super()._most_rows() // self.replicas.size)

    def _rows(self, plan: PipelinePlan, fed: int, k: int, iteration: int) -> np.ndarray:
        """Return the next piece of a global batch: all pieces of one batch, then those of the next."""
        number, part = divmod(k, self.replicas.size)
        return part_of(own_rows(plan, number, iteration), self.replicas.size, part)

    @staticmethod
    def _of_pipeline(transforms: Sequence[Transform], number: int, pipeline: int) -> list[Transform]:
        return list(transforms)


class ByHint(Everything):
    """The division `Everything`, with the hints of ``shard`` replaced by the pipelines' numbers."""

    name = "HINT"

    @staticmethod
    def _of_pipeline(transforms: Sequence[Transform], number: int, pipeline: int) -> list[Transform]:
        return with_hints(transforms, number, pipeline)


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


def described(source: Source, transforms: Sequence[Transform]) -> dict[str, Any]:
    """Return what a state says of a dataset."""
    return {
        "batch": _global_batch(transforms),
        "pipeline": [each.without_numbers() for each in transforms],
        "seeds": seeds_of(source, transforms),
        "source": source.identity(),
    }


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


def with_hints(transforms: Sequence[Transform], number: int, pipeline: int) -> list[Transform]:
    """Return the transforms with the hints of ``shard`` replaced by a pipeline's numbers."""
    return [
        Shard(number, pipeline) if isinstance(each, Shard) and each.is_hint else each for each in transforms
    ]


def own_rows(plan: PipelinePlan, step: int, iteration: int) -> np.ndarray:
    """Return the rows of batch ``step`` of a plan, an empty array after the last."""
    if plan.length is not None and step >= plan.length:
        return plan.locate(np.empty(0, np.int64), iteration)
    return plan.rows(step, iteration)


def _too_few(rows: Sequence[int], pipelines: int, replicas: ReplicaGroup) -> str:
    """Return why there are too few files, or an empty text."""
    reading = "replicas" if pipelines == replicas.size else "ranks"
    return f"there are {len(rows)} files with rows for {pipelines} {reading}" if len(rows) < pipelines else ""


def _automatic(
    source: Source, transforms: Sequence[Transform], replicas: ReplicaGroup, balance: bool
) -> Division:
    """Return the FILE division if it keeps the rows and, nearly, the number of steps; otherwise DATA."""
    rows, fed = source.file_rows(), len(pipelines_of(replicas))
    # Under FILE, take, skip and shard would count the rows of each replica's own files.
    if fed == 1 or not rows or any(isinstance(each, (Take, Skip, Shard)) for each in transforms):
        return ByData(source, transforms, replicas)
    why = _too_few(rows, fed, replicas)
    if not why and _global_batch(transforms) < replicas.size:
        why = f"a batch of {_global_batch(transforms)} rows is shared by {replicas.size} replicas"
    if not why and (excess := imbalance(rows, fed, balance)) > MOST_IMBALANCE:
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


def _global_batch(transforms: Sequence[Transform]) -> Any:
    return next((each.size for each in transforms if isinstance(each, Batch)), None)


def _of_share(transforms: Sequence[Transform], replicas: int, block: range) -> list[Transform]:
    shared = []
    for each in transforms:
        if isinstance(each, Batch):
            first, last = pieces(each.size, replicas, block)
            each = replace(each, size=last - first)
        shared.append(each)
    return shared


def _longest(lengths: Sequence[int | None]) -> int | None:
    finite = [length for length in lengths if length is not None]
    return max(finite) if len(finite) == len(lengths) else None
