"""Distributed datasets of a function, which makes one for each input pipeline."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mpistrat import nest
from mpistrat.arrays.device import Device
from mpistrat.data.dataset import Dataset
from mpistrat.data.distribute.autoshard import Division, own_rows, pipelines_of
from mpistrat.data.distribute.dataset import DistributedDataset
from mpistrat.data.errors import explain_empty_parts
from mpistrat.data.options import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    InputContext,
    InputOptions,
    InputReplicationMode,
    check_input_options,
)
from mpistrat.data.pipeline.definition import Definition
from mpistrat.data.pipeline.optional import Element
from mpistrat.data.rows import spec
from mpistrat.data.rows.contracts import Seed, ranks_of_node
from mpistrat.replicas import ReplicaGroup

if TYPE_CHECKING:
    from mpistrat.runtime.topology import Topology


class OwnDatasets(Division):
    """The division of datasets that the pipelines made themselves, each in batches of its own size.

    ``datasets`` are the datasets of this rank's pipelines. ``shared`` describes the datasets of all pipelines in a
    state that must not depend on the rank.
    """

    name = "its own"
    _spec: Any = None

    def __init__(
        self,
        datasets: Sequence[Definition],
        replicas: ReplicaGroup,
        pipelines: list[range],
        steps: int | None,
        shared: Mapping[str, Any] | None,
        ranks: Topology | None = None,
    ):
        self.datasets, self.steps, self.shared = datasets, steps, shared
        super().__init__(datasets[0], replicas, ranks)
        self.pipelines = pipelines  # with PER_REPLICA one for each replica, where the base has one for each rank
        self.readings = self._read_by(dataset.plan for dataset in datasets)

    def _begin(self) -> None:
        pass

    def _rows(self, plan: Any, local_replicas: int, k: int, iteration: int) -> Any:
        """Return the rows of the next batch of a pipeline's dataset; where it communicates, the batch or None."""
        return plan.element_if_any(k, iteration) if self.communicates else own_rows(plan, k, iteration)

    def described(self) -> dict[str, Any]:
        """Return the entries of a state that describe the dataset; of pipeline 0, if all ranks share one state."""
        return super().described() if self.shared is None else dict(self.shared)

    def with_seeds(self, seeds: Sequence[int]) -> OwnDatasets:
        """Return the same division with other seeds where the program gave none."""
        own_seeds = self.described()["seeds"]
        drawn = [Seed(value, seed.given) for value, seed in zip(seeds, own_seeds, strict=True)]
        shared = None if self.shared is None else {**self.shared, "seeds": drawn}
        datasets = [dataset.with_drawn(drawn) for dataset in self.datasets]
        return OwnDatasets(datasets, self.replicas, self.pipelines, self.steps, shared, self.ranks)

    def batch(self, step: int, iteration: int) -> Any:
        """Return the batch of a step. A dataset that has ended gives empty batches until all have."""
        if self.ranks is None:
            return super().batch(step, iteration)
        batches = [*chain.from_iterable(reading.of_step(step, iteration) for reading in self.readings)]
        first = next((batch for batch in batches if batch is not None), None)
        if self._spec is None:
            # A replica whose dataset has no rows at all learns the shape of an empty batch from the others.
            own_spec = None if first is None else nest.map_structure(spec.of_array, first)
            everyone = self.ranks.all_gather_object(own_spec)
            self._spec = next((rank_spec for rank_spec in everyone if rank_spec is not None), None)
            ended = self._spec is None
        else:
            ended = self.ranks.all_true(first is None)
        if ended:
            raise StopIteration
        if any(batch is None for batch in batches):
            explain_empty_parts()
        return self.assemble([spec.no_rows_of(self._spec) if batch is None else batch for batch in batches])


class DistributedDatasetsFromFunction(DistributedDataset[Element]):
    """The datasets that a function made, one for each input pipeline, iterated with equal numbers of steps.

    Made by ``strategy.distribute_datasets_from_function(dataset_fn)``, on all replicas. The library does not
    divide these datasets. The function does that itself, for example with `Dataset.shard`. A replica with a
    shorter dataset gets empty batches until the longest ends. Shuffles without a seed take the seeds of
    pipeline 0, so that ``shuffle()`` before ``shard()`` loses no row.

    Parameters
    ----------
    dataset_fn : callable
        Called with an `InputContext` for each pipeline of this rank. Returns a Dataset, in batches of a replica's size.
    ranks, options, device, replicas
        As for `DistributedDataset`.
    in_sync : int, optional
        The number of replicas that take part in a step; by default all.

    Raises
    ------
    TypeError
        If ``dataset_fn`` is not callable. On every rank, if it did not return a Dataset on one of them.
    RuntimeError
        On the other ranks, if the function raised on one of them.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> alone = SimpleNamespace(size=1, rank=0, all_gather_object=lambda x: [x])
    >>> def dataset_fn(context):
    ...     size = context.get_per_replica_batch_size(4)
    ...     return Dataset.range(6).shard(context.num_input_pipelines, context.input_pipeline_id).batch(size)
    >>> list(DistributedDatasetsFromFunction(dataset_fn, alone))
    [array([0, 1, 2, 3]), array([4, 5])]
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        ranks: Topology,
        options: InputOptions | None = None,
        device: Device = Device("cpu"),  # noqa: B008 - a tuple
        replicas: ReplicaGroup | None = None,
        in_sync: int | None = None,
    ):
        if not callable(dataset_fn):
            raise TypeError(f"dataset_fn must be a function of an InputContext, not {dataset_fn!r}")
        check_input_options(options)
        replicas = replicas or ReplicaGroup(ranks)
        mode = InputReplicationMode.PER_WORKER if options is None else options.experimental_replication_mode
        pipelines = pipelines_of(replicas, mode is InputReplicationMode.PER_REPLICA)
        local = [number for number, block in enumerate(pipelines) if block.start in replicas.local]
        # With a pipeline for each replica, a state is equal on all ranks, and continues on any number of them.
        of_all = replicas.is_virtual or len(pipelines) > len(pipelines_of(replicas))
        definitions: list[Definition] = []
        failure: Exception | None = None
        local_reports: list[_Report] = []
        for number in local:
            report = _Report(number, f"rank {ranks.rank}" + f", for replica {number}" * of_all)
            local_reports.append(report)
            try:
                dataset = dataset_fn(InputContext(len(pipelines), number, in_sync or replicas.size))
                if isinstance(dataset, Dataset):
                    # The datasets of this rank share the memory of the node, too.
                    definitions.append(dataset.definition.ready(ranks_of_node(ranks) * len(local)))
                    report.length, report.batched = dataset.cardinality(), dataset.batch_size is not None
                    report.describe(definitions[-1], of_all)
                else:
                    report.kind = type(dataset).__name__
            except Exception as error:
                failure = error
                report.failure = f"{type(error).__name__}: {error}"
                break  # the datasets of further replicas are of no use
        everyone = [*chain.from_iterable(ranks.all_gather_object(local_reports))]
        if failure is not None:
            raise failure  # with its traceback; the other ranks raise an error that names this one
        _check(everyone)
        # The ranks of one replica report the same pipeline.
        reports = [*{report.pipeline: report for report in sorted(everyone, key=attrgetter("pipeline"))}.values()]
        datasets = [definition.with_drawn(reports[0].seeds) for definition in definitions]
        shared = reports[0].described if of_all else None
        if shared is not None:
            shared["datasets"] = [report.digest for report in reports]
        lengths = [report.length for report in reports]
        if UNKNOWN_CARDINALITY in lengths:
            division = OwnDatasets(datasets, replicas, pipelines, None, shared, ranks)
        else:
            ends = zip(lengths, pipelines, strict=True)
            # A pipeline deals its batches in turn to the replicas of its block.
            steps = None if INFINITE_CARDINALITY in lengths else max(-(-n // len(block)) for n, block in ends)
            division = OwnDatasets(datasets, replicas, pipelines, steps, shared)
        self._begin(division, ranks, datasets[0].options.prefetch, options, device, dataset_fn)


@dataclass
class _Report:
    """The report of a rank to the others, of the dataset of a pipeline.

    If all ranks share one state, ``described`` has its entries for the dataset, and ``digest`` their digest.
    """

    pipeline: int
    where: str
    length: int = 0
    batched: bool = True
    seeds: Sequence[Seed] = ()
    kind: str = ""
    failure: str = ""
    described: dict[str, Any] | None = None
    digest: str = ""

    def describe(self, ready: Definition, for_state: bool) -> None:
        """Describe the definition of a dataset, ready for its shuffles."""
        self.seeds = ready.seeds()
        if for_state:
            self.described = ready.described()
            self.described["source"].pop("list", None)  # of files, up to 64 KiB for each pipeline
            seeds = [seed.value for seed in self.seeds if seed.given]
            text = json.dumps({**self.described, "seeds": seeds}, sort_keys=True, default=str)
            self.digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _check(reports: list[_Report]) -> None:
    for report in reports:
        if report.failure:
            raise RuntimeError(f"dataset_fn raised on {report.where}: {report.failure}")
    for report in reports:
        if report.kind:
            raise TypeError(f"dataset_fn must return a Dataset, but on {report.where} it returned {report.kind}")
    lengths = [report.length for report in reports]
    unbatched = [report.where for report in reports if not report.batched]
    if unbatched and (len(set(lengths)) > 1 or UNKNOWN_CARDINALITY in lengths):
        raise ValueError(
            "datasets of unequal or unknown length must be batched, so that empty batches can follow a short one: "
            f"{unbatched[0]} has single rows, and the lengths are {lengths}; call "
            ".batch(context.get_per_replica_batch_size(...))"
        )
