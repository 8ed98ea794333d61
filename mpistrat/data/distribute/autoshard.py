"""Division of a dataset over the replicas: one class per policy, with the number of steps known beforehand.

A *pipeline* reads for some replicas. With ``virtual_replicas`` each replica has its own, so that the rows of a replica
do not depend on the number of ranks. Otherwise each rank has one, and deals its batches to its replicas in turn.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, dropwhile, islice
from typing import Any, NamedTuple

import numpy as np

from mpistrat import nest
from mpistrat.data.options import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    MOST_PREFETCH,
    PREFETCH,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
)
from mpistrat.data.pipeline.chosen import Chosen
from mpistrat.data.pipeline.definition import Definition
from mpistrat.data.pipeline.plan import PipelinePlan, in_a_list
from mpistrat.data.pipeline.transforms import (
    Batch,
    Repeat,
    Shard,
    Shuffle,
    Skip,
    Take,
    Transform,
    before_batch,
    length_of,
)
from mpistrat.data.rows import elements
from mpistrat.data.rows.lanes import Lanes, part_of, pieces
from mpistrat.replicas import ReplicaGroup
from mpistrat.runtime.topology import Topology
from mpistrat.values import PerReplica

_log = logging.getLogger("mpistrat.data")


class Reading(NamedTuple):
    """A plan that reads for ``local_replicas`` replicas of this rank. ``rows(k, iteration)`` is for batch ``k``."""

    plan: Any
    local_replicas: int
    rows: Callable[..., Any]

    def of_step(self, step: int, iteration: int) -> list[Any]:
        """Return the rows of the batches of a step."""
        return [self.rows(k, iteration) for k in range(step * self.local_replicas, (step + 1) * self.local_replicas)]


def pipelines_of(replicas: ReplicaGroup, per_replica: bool = False) -> list[range]:
    """Return the replicas that each input pipeline feeds."""
    if replicas.is_virtual or per_replica:
        return [range(replica, replica + 1) for replica in range(replicas.size)]
    # A set: the ranks of one replica have the same block.
    blocks = {replicas.blocks[replicas.rank_of(replica)] for replica in range(replicas.size)}
    return sorted(blocks, key=lambda block: block.start)


class Division:
    """The part of a dataset that the replicas of a rank get.

    ``whole`` is the whole dataset, and ``readings`` the plans by which this rank reads for its replicas, in their
    order. ``steps`` is the number of steps of an epoch on all replicas, None if it is endless. ``ranks`` are given if
    the number of rows is unknown: they exchange a flag at each step, until no replica has a row.
    """

    name: str
    why: str = ""
    """Why AUTO does not give lanes to a dataset of files."""
    steps: int | None
    readings: Sequence[Reading]
    _rows: Callable[..., Any]

    def __init__(self, whole: Definition, replicas: ReplicaGroup, ranks: Topology | None = None, balance: bool = False):
        self.whole, self.replicas, self.ranks, self.balance = whole, replicas, ranks, balance
        self.pipelines = pipelines_of(replicas)
        self.communicates = ranks is not None
        self._begin()

    def _begin(self) -> None:
        """Set ``steps`` and ``readings``."""
        raise NotImplementedError

    @property
    def plan(self) -> Any:
        """The first plan by which this rank reads."""
        return self.readings[0].plan

    @property
    def local(self) -> list[tuple[int, range]]:
        """The pipelines of this rank: the number of each, and the replicas that it feeds."""
        local = self.replicas.local
        return [(number, block) for number, block in enumerate(self.pipelines) if block.start in local]

    def _read_by(self, plans: Iterable[Any]) -> list[Reading]:
        """Return how the pipelines of this rank read, by these plans."""
        local_replicas = [len(block) for _, block in self.local]
        return [Reading(plan, n, partial(self._rows, plan, n)) for plan, n in zip(plans, local_replicas, strict=True)]

    @property
    def cardinality(self) -> int:
        """Number of steps, `INFINITE_CARDINALITY`, or `UNKNOWN_CARDINALITY`."""
        if self.communicates:
            return UNKNOWN_CARDINALITY
        return INFINITE_CARDINALITY if self.steps is None else self.steps

    def batch(self, step: int, iteration: int) -> Any:
        """Return the batch of a step: of the one replica of this rank, or a structure of PerReplica values.

        Where it communicates, all ranks call it for the same step. It raises StopIteration if no replica has a row.
        """
        if self.ranks is None:
            batches = [reading.plan.read_each(reading.of_step(step, iteration)) for reading in self.readings]
            return self.assemble([*chain(*batches)])
        plan_rows = [(reading.plan, rows) for reading in self.readings for rows in reading.of_step(step, iteration)]
        # One flag for all replicas: while one of them has a row, the others get empty batches.
        if self.ranks.all_true(all(rows is None for _, rows in plan_rows)):
            raise StopIteration
        return self.assemble([plan.read(rows or []) for plan, rows in plan_rows])

    def batches(self, step: int, iteration: int, together: int) -> Iterator[list[Any]]:
        """Yield the batches from a step on, in lists. Up to ``together`` are read at once."""
        lists = [
            plan.lists(partial(rows, iteration=iteration), step, self.steps, together, local_replicas)
            for plan, local_replicas, rows in self.readings
        ]
        return lists[0] if self._bare else self._by_step(lists, step, together)

    def _by_step(self, lists: Sequence[Iterator[list[Any]]], step: int, together: int) -> Iterator[list[Any]]:
        """Yield the batches of all plans, step by step, in lists that grow as theirs."""
        # The same iterator once for each replica of a plan: zip takes so many consecutive batches of it for a step.
        counts = [reading.local_replicas for reading in self.readings]
        streams = [[chain.from_iterable(plan_lists)] * n for plan_lists, n in zip(lists, counts, strict=True)]
        steps = map(self.assemble, zip(*chain(*streams), strict=False))
        size, most = 1, 1 if self.plan.maps else together
        while self.steps is None or step < self.steps:
            yield from in_a_list(islice(steps, size))
            step, size = step + size, min(2 * size, most)

    @property
    def _bare(self) -> bool:
        """Whether the program gets plain arrays: one replica, not virtual, as programs must not depend on the ranks."""
        return self.replicas.count == 1 and not self.replicas.is_virtual

    def assemble(self, batches: Sequence[Any]) -> Any:
        """Return the batches of the replicas of this rank as the program gets them. Raise if structures differ."""
        if self._bare:
            return batches[0]
        leaves, rebuild = nest.flatten(batches[0])
        columns = [leaves, *(nest.flatten(batch)[0] for batch in batches[1:])]
        if len({*map(len, columns)}) > 1:
            raise ValueError(
                f"the batches of replicas {[*self.replicas.local]} have {[*map(len, columns)]} arrays: let dataset_fn "
                "return datasets of the same structure"
            )
        return rebuild([PerReplica(values) for values in zip(*columns, strict=True)])

    def prefetch_sizes(self, prefetch: int, kind: str = "cpu") -> tuple[int, int]:
        """Return how many lists of `batches` may wait, and how many batches are read at once.

        No list waits where the program makes the batches itself: small ones of rows in memory, unless it asked for
        read-ahead. Handing a list over to another thread takes as long as making it.
        """
        if self.plan.batch is None:
            return max(PREFETCH, prefetch), 1  # single rows, of a dataset that a function made
        best = self.plan.together(self._most_rows())
        if self.plan.maps:  # they come one by one
            return PREFETCH if prefetch == AUTOTUNE else prefetch, max(1, min(best, MOST_PREFETCH))
        most = min(max(PREFETCH, best), MOST_PREFETCH) if prefetch == AUTOTUNE else prefetch
        # Half of them: while the program uses one list, the thread reads the next.
        together = max(1, min(most if most <= PREFETCH else most // 2, best))
        if prefetch == AUTOTUNE and best > 1 and self.plan.in_memory and kind == "cpu":
            return 0, together
        return most // together, together

    def _most_rows(self) -> int:
        """Return the most rows that the first plan reads in a step; it may be fewer, or none."""
        assert self.plan.batch is not None
        return self.plan.batch.size

    @property
    def lanes(self) -> Lanes | None:
        """The lanes of the files, if the division keeps files apart."""
        return next((t.lanes for t in self.whole.transforms if isinstance(t, Shuffle) and t.lanes), None)

    def rebuilt(self, whole: Definition) -> Division:
        """Return the same division of another definition of the dataset."""
        return type(self)(whole, self.replicas, self.ranks, self.balance)

    def described(self) -> dict[str, Any]:
        """Return the entries of a state that describe the dataset, which must be equal to restore the state."""
        return self.whole.described()

    def with_seeds(self, seeds: Sequence[int]) -> Division:
        """Return the same division with other seeds."""
        return self.rebuilt(self.whole.with_seeds(seeds))

    def after(self, rows: int) -> Division:
        """Return the division of an epoch without its first rows."""
        transforms = self.whole.transforms
        at = len(before_batch(transforms))
        # Before the batch, so that the rest of the epoch makes global batches of any size.
        return self.rebuilt(replace(self.whole, transforms=(*transforms[:at], Skip(rows), *transforms[at:])))


class ByData(Division):
    """The division that cuts every global batch into one piece per replica."""

    name = "DATA"

    def _begin(self) -> None:
        plan = self.whole.shared_plan
        self.steps = plan.length
        size, count, local = self.replicas.size, self.replicas.count, self.replicas.local
        # One object for all steps: a plan keeps its look-ahead while the cut is the same object.
        self._cut = None if count == size else partial(pieces, replicas=size, block=local)
        # The cut for one replica is its piece: no second cut.
        rows = partial(plan.rows, cut=self._cut) if count == 1 else partial(self._rows, plan, count)
        self.readings = [Reading(plan, count, rows)]

    def _most_rows(self) -> int:
        size = super()._most_rows()
        return min(size, self.replicas.count * -(-size // self.replicas.size))

    def _rows(self, plan: Any, local_replicas: int, k: int, iteration: int) -> Any:
        """Return the row numbers of a piece of a global batch. Those of a rank are consecutive, and found together."""
        return part_of(plan.rows(k // local_replicas, iteration, self._cut), local_replicas, k % local_replicas)


class ByLanes(ByData):
    """The division that cuts every global batch, of shuffled files in lanes: a replica reads files of its own."""

    name = "AUTO"

    def in_lanes(self, lanes: Lanes) -> Division:
        """Return the same division with other lanes."""
        return self.rebuilt(_in_lanes(self.whole, lanes))


class ByFile(Division):
    """The division that deals files to the pipelines."""

    def _begin(self) -> None:
        self.name = "FILE, balanced" if self.balance else "FILE"
        source, transforms, replicas = self.whole.source, self.whole.transforms, self.replicas
        rows = _file_rows(self.whole)
        if not rows:
            raise ValueError(
                f"AutoShardPolicy.FILE needs a dataset of files, but this is made of {source}: use AutoShardPolicy.DATA"
            )
        pipelines = self.pipelines
        if why := _too_few(rows, len(pipelines), replicas):
            raise ValueError(
                f"AutoShardPolicy.FILE needs at least one file per replica, but {why}: use AutoShardPolicy.DATA, or "
                "split the files (mpistrat shard)"
            )
        if (self.whole.batch_size or 0) < replicas.size:
            raise ValueError(
                "AutoShardPolicy.FILE needs a row of every global batch for each replica, but "
                f"batch({self.whole.batch_size}) is shared by {replicas.size} replicas: use a larger batch, or "
                "AutoShardPolicy.DATA"
            )
        dealt = deal(rows, len(pipelines), self.balance)
        shares = [
            _of_share(_of_files(transforms, rows, files), replicas.size, block)
            for files, block in zip(dealt, pipelines, strict=True)
        ]
        self.steps = _longest(
            length_of(sum(rows[i] for i in files), share) for files, share in zip(dealt, shares, strict=True)
        )
        self.readings = self._read_by(
            PipelinePlan(source.of_files(dealt[number]), shares[number], source) for number, _ in self.local
        )

    def _rows(self, plan: PipelinePlan, local_replicas: int, k: int, iteration: int) -> np.ndarray:
        """Return the next rows of a pipeline's files, an empty array after the last."""
        return part_of(own_rows(plan, k // local_replicas, iteration), local_replicas, k % local_replicas)


class Unsharded(Division):
    """The division that gives every pipeline all rows, or all of its own ``shard(SHARD_HINT, SHARD_HINT)``."""

    name = "OFF"

    def _begin(self) -> None:
        of_pipelines = [self._of_pipeline(number) for number in range(len(self.pipelines))]
        longest = _longest(definition.length for definition in of_pipelines)
        fewest = min(map(len, self.pipelines))  # replicas of a pipeline: it deals its batches last
        self.steps = None if longest is None else -(-longest * self.replicas.size // fewest)
        self.readings = self._read_by(of_pipelines[number].shared_plan for number, _ in self.local)

    def _most_rows(self) -> int:
        return -(-super()._most_rows() // self.replicas.size)

    def _rows(self, plan: Any, local_replicas: int, k: int, iteration: int) -> Any:
        """Return the next piece of a global batch: all pieces of one batch, then all pieces of the next."""
        number, part = divmod(k, self.replicas.size)
        rows = part_of(own_rows(plan, number, iteration), self.replicas.size, part)
        # Another replica of this rank gets the same rows of a stream, and a function of one may write to them.
        return [*map(elements.copied, rows)] if self.communicates and rows and self.replicas.count > 1 else rows

    def _of_pipeline(self, pipeline: int) -> Definition:
        return self.whole  # with one plan for all, as some iterables can be read only once


class ByHint(Unsharded):
    """The division `Unsharded`, with the hints of ``shard`` replaced by the pipelines' numbers."""

    name = "HINT"

    def _of_pipeline(self, pipeline: int) -> Definition:
        numbered = Shard(len(self.pipelines), pipeline)
        transforms = (numbered if isinstance(t, Shard) and t.is_hint else t for t in self.whole.transforms)
        return replace(self.whole, transforms=tuple(transforms))


def divide(
    policy: AutoShardPolicy,
    source: Any,
    transforms: Sequence[Transform],
    replicas: ReplicaGroup,
    balance: bool,
    ranks: Topology | None = None,
) -> Division:
    """Return the division that a policy asks for. Raise ValueError on every replica if it does not suit the dataset."""
    if policy is AutoShardPolicy.FILE and replicas.size > 1 and replicas.is_chief:
        _say_that_files_depend_on_replicas()
    return _DIVISIONS[policy](Definition(source, tuple(transforms)), replicas, ranks, balance)


def deal(rows: Sequence[int], replicas: int, balance: bool) -> list[list[int]]:
    """Return the files of every replica.

    With ``balance`` the longest file comes first, and each file goes to the replica with the fewest rows. That is the
    LPT rule of Graham, "Bounds on Multiprocessing Timing Anomalies" (1969). Its longest share is at most a third longer
    than the best possible one.
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
    """Return by what fraction the longest share of files is longer than the mean."""
    longest = max(sum(rows[i] for i in files) for files in deal(rows, replicas, balance))
    return longest * replicas / sum(rows) - 1


def own_rows(plan: Any, step: int, iteration: int) -> Any:
    """Return the rows of batch ``step`` of a plan; after the last an empty array, or None for a stream."""
    if plan.length is not None and step >= plan.length:
        return plan.locate(np.empty(0, np.int64), iteration)
    return plan.rows(step, iteration)


def _too_few(rows: Sequence[int], pipelines: int, replicas: ReplicaGroup) -> str:
    """Return why there are too few files, or an empty text."""
    reading = "replicas" if pipelines == replicas.size else "ranks"
    if len(rows) >= pipelines:
        return ""
    files = "is 1 file" if len(rows) == 1 else f"are {len(rows)} files"
    return f"there {files} with rows for {pipelines} {reading}"


def _automatic(whole: Definition, replicas: ReplicaGroup, ranks: Topology | None, balance: bool) -> Division:
    """Return the division in lanes for shuffled files, where nothing needs another order; otherwise DATA."""
    files = sum(rows > 0 for rows in _file_rows(whole))
    if files < 2:
        return ByData(whole, replicas, ranks)
    # Each lane gives at least one row to a batch.
    count = min(files, whole.batch_size or 0, whole.source.side_by_side())
    why = why_not_lanes(whole.transforms) or ("" if count > 1 else "batches, or the memory, have room for one file")
    if not why:
        whole = _in_lanes(replace(whole, source=whole.source.by_file()), Lanes(whole.batch_size or 1, count))
        return ByLanes(whole, replicas, ranks)
    if replicas.is_chief:
        _log.info("AutoShardPolicy.AUTO divides every batch of %s (DATA): %s", whole.source, why)
    division = ByData(whole, replicas, ranks)
    division.why = why
    return division


def why_not_lanes(transforms: Sequence[Transform]) -> str:
    """Return why the transforms of rows exclude the order of lanes, or an empty text."""
    reordering = [t for t in before_batch(transforms) if t.reorders]
    # Selections in ascending order keep the rows of a file together, and may precede the shuffle.
    reordering = [*dropwhile(lambda t: isinstance(t, Chosen) and t.ascending, reordering)]
    first = reordering[0] if reordering else None
    if not any(isinstance(t, Shuffle) for t in reordering):
        return "the files are read in order, as there is no shuffle()"
    if not isinstance(first, Shuffle):
        return f"{first} stands before shuffle()"
    if first.mode != "block":
        return "shuffle(mode='exact') permutes all rows"
    # These take rows in the order of the lanes.
    other = next((t for t in reordering[1:] if not isinstance(t, (Repeat, Take, Skip))), None)
    return "" if other is None else f"{other} follows shuffle()"


def _in_lanes(whole: Definition, lanes: Lanes) -> Definition:
    """Return a definition with lanes for its first shuffle."""
    at = next(i for i, t in enumerate(whole.transforms) if isinstance(t, Shuffle))
    shuffle: Any = whole.transforms[at]
    transforms = (*whole.transforms[:at], replace(shuffle, lanes=lanes), *whole.transforms[at + 1 :])
    return replace(whole, transforms=transforms)


@cache
def _say_that_files_depend_on_replicas() -> None:
    _log.warning(
        "AutoShardPolicy.FILE: the rows of a batch, and the number of steps, depend on the number of replicas, as in "
        "tf.distribute; AutoShardPolicy.AUTO gives the same batches to any number"
    )


_DIVISIONS: dict[AutoShardPolicy, Callable[..., Division]] = {
    AutoShardPolicy.AUTO: _automatic,
    AutoShardPolicy.DATA: ByData,
    AutoShardPolicy.FILE: ByFile,
    AutoShardPolicy.HINT: ByHint,
    AutoShardPolicy.OFF: Unsharded,
}


def _file_rows(whole: Definition) -> Sequence[int]:
    return () if whole.streamed else whole.source.file_rows()


def _of_share(transforms: Sequence[Transform], replicas: int, block: range) -> list[Transform]:
    shared = []
    for transform in transforms:
        if isinstance(transform, Batch):
            first, last = pieces(transform.size, replicas, block)
            transform = replace(transform, size=last - first)
        shared.append(transform)
    return shared


def _of_files(transforms: Sequence[Transform], rows: Sequence[int], which: Sequence[int]) -> list[Transform]:
    """Return the transforms for the rows of some files: what is chosen of all rows is chosen of these."""
    result: list[Transform] = []
    starts, apart = np.cumsum([0, *rows]), True
    for transform in transforms:
        if isinstance(transform, Chosen):
            if not (apart and transform.ascending):
                raise ValueError(
                    f"AutoShardPolicy.FILE keeps files apart, but {transform} does not: use AutoShardPolicy.AUTO"
                )
            result.append(transform.of_files(starts, which))
            starts = transform.numbers(int(starts[-1])).searchsorted(starts)
        else:
            result.append(transform)
            # After a transform that mixes files, a number belongs to no file.
            apart = apart and not transform.reorders
    return result


def _longest(lengths: Iterable[int | None]) -> int | None:
    known: list[Any] = [*lengths]
    return None if None in known else max(known)
