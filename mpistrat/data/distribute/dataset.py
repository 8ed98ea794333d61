"""Distributed datasets: global batches divided over the replicas, or a dataset for each pipeline by a function."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic

from mpistrat import absent, representation
from mpistrat.arrays.device import Device
from mpistrat.data.dataset import Dataset
from mpistrat.data.distribute.autoshard import Division, OwnDatasets, divide, pipelines_of
from mpistrat.data.distribute.iterator import DistributedIterator, Passes
from mpistrat.data.options import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    check_input_options,
)
from mpistrat.data.pipeline.definition import Definition
from mpistrat.data.pipeline.mapping import generators_of
from mpistrat.data.pipeline.optional import Element
from mpistrat.data.pipeline.transforms import Map, Seeded, Transform
from mpistrat.data.rows.contracts import Seed, ranks_of_node, warn_together
from mpistrat.replicas import ReplicaGroup
from mpistrat.runtime.environment import rc

if TYPE_CHECKING:
    from mpistrat.runtime.topology import Topology


class DistributedDataset(Generic[Element]):
    """A dataset of global batches, divided over the replicas.

    Made by ``strategy.experimental_distribute_dataset(dataset)``, on all replicas. The number of steps is
    computed here and is equal on all replicas, so iteration does not communicate. A dataset made of an
    iterable is the exception: its replicas exchange a flag at each step.

    Parameters
    ----------
    dataset : Dataset
        A dataset of global batches: ``.batch(...)`` must be among its transforms.
    ranks : Topology
        The ranks that share the dataset.
    options : InputOptions, optional
        Options of the input.
    device : Device, optional
        The device that batches are fetched to, unless the options disable that. By default the host.
    replicas : ReplicaGroup, optional
        Which rank plays which replica; by default each rank plays one.
    all_ranks : Topology, optional
        All ranks of the program, where a replica is several of them: they draw the same seeds.

    Raises
    ------
    TypeError
        If ``dataset`` is not a Dataset.
    ValueError
        If the dataset is not batched, differs between replicas, or does not suit the policy in its options
        (see `AutoShardPolicy`).

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> second_of_two = SimpleNamespace(size=2, rank=1, all_gather_object=lambda x: [x, x])
    >>> list(DistributedDataset(Dataset.range(7).batch(4), second_of_two))
    [array([2, 3]), array([6])]
    """

    if not TYPE_CHECKING:  # a type checker must find wrong names itself

        def __getattr__(self, name: str) -> Any:
            return absent.of_object(self, name, absent.OF_DISTRIBUTED_DATASET)

    def __init__(
        self,
        dataset: Dataset[Element],
        ranks: Topology,
        options: InputOptions | None = None,
        device: Device = Device("cpu"),  # noqa: B008 - a tuple
        replicas: ReplicaGroup | None = None,
        all_ranks: Topology | None = None,
    ):
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"only a mpistrat.data.Dataset can be distributed, not {type(dataset).__name__}: make one "
                "with Dataset.from_arrays or Dataset.from_hdf5"
            )
        check_input_options(options)
        if options is not None and options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is only for distribute_datasets_from_function: use PER_WORKER"
            )
        if dataset.batch_size is None:
            raise ValueError(
                f"{dataset} has single rows, but only global batches can be divided over replicas: "
                "call .batch(global_batch_size) first"
            )
        distribute = dataset.options().experimental_distribute
        policy = distribute.auto_shard_policy
        definition = dataset.definition
        facts = {
            "source": definition.source.fingerprint(),
            "pipeline": [_description(transform) for transform in definition.transforms],
            "auto_shard_policy": policy.name + ", balanced" * distribute.balance,
            "shuffle_memory": dataset.options().shuffle_memory,
        }
        if "data" in rc.debug and policy is not AutoShardPolicy.OFF and not definition.streamed:
            facts["checksum"] = definition.source.checksum()
        # One rank looks for generators, which takes 9 ms of imports, and warns for all.
        looks = ranks.size > 1 and ranks.rank == 0 and policy is not AutoShardPolicy.OFF
        generators = _generators(definition) if looks else []
        # All that ranks must know of each other, in one collective.
        everyone = ranks.all_gather_object((facts, definition.seeds(), generators))
        _check_equal([description for description, _, _ in everyone])
        warn_together(ranks, everyone[0][2])
        # Only after the comparison: other datasets on some ranks would make other collectives.
        definition.agree(ranks)
        drawn = everyone[0][1]
        if all_ranks is not None and all_ranks is not ranks:  # the ranks of one replica read the same rows
            drawn = all_ranks.broadcast_object(drawn)
        ready = definition.with_drawn(drawn).ready(ranks_of_node(ranks), ranks)
        unknown = ranks if ready.streamed else None
        replicas = replicas or ReplicaGroup(ranks)
        division = divide(policy, ready.source, ready.transforms, replicas, distribute.balance, unknown)
        self._begin(division, ranks, definition.options.prefetch, options, device, dataset)

    def _begin(
        self,
        division: Division,
        ranks: Topology,
        prefetch: int | None,
        options: InputOptions | None,
        device: Device,
        origin: object,
    ) -> None:
        self._origin = origin
        self._passes = Passes(division, ranks, prefetch)
        if options is None or options.experimental_fetch_to_device:
            self._passes.device = device

    def __iter__(self) -> DistributedIterator[Element]:
        return DistributedIterator(self._passes)

    def __len__(self) -> int:
        if self.cardinality < 0:
            raise TypeError(f"a distributed dataset of {self._facts()['steps']} length has no len()")
        return self.cardinality

    # Without this method, bool() would call len(), which raises for endless datasets.
    def __bool__(self) -> bool:
        return True

    def _facts(self) -> dict[str, Any]:
        words = {INFINITE_CARDINALITY: "endless", UNKNOWN_CARDINALITY: "unknown"}
        division = self._passes.division
        facts = {"of": self._origin, "steps": words.get(self.cardinality, self.cardinality)}
        if division.lanes is not None:
            return {**facts, "lanes": division.lanes.number}
        return {**facts, "no lanes": division.why} if division.why else facts

    def __repr__(self) -> str:
        return representation.text("DistributedDataset", self._facts())

    def _repr_html_(self) -> str:
        return representation.table("DistributedDataset", self._facts())

    def state(self) -> dict[str, Any]:
        """Return the position of the newest iterator, or the start of the next epoch if that iterator has ended.

        See `DistributedIterator.state`.
        """
        return self._passes.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let the next iterator continue at a saved position; see `DistributedIterator.restore`.

        Parameters
        ----------
        state : dict
            What `state` returned.
        """
        self._passes.restore(state)

    @property
    def cardinality(self) -> int:
        """Number of steps of an epoch, equal on all replicas; ``len`` returns it, too.

        `INFINITE_CARDINALITY` for an endless dataset, `UNKNOWN_CARDINALITY` for a dataset made of an iterable.
        """
        return self._passes.division.cardinality

    @property
    def element_spec(self) -> Any:
        """Structure of the batches of a replica, with an `ArraySpec` for each array.

        With several replicas, None stands for the number of rows, because their pieces may differ by one row.
        """
        return self._passes.element_spec

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold the batches of one epoch on this rank into a state.

        Parameters
        ----------
        initial_state : object
            The state before the first batch.
        reduce_func : callable
            Called with the state and a batch. Returns the next state.

        Returns
        -------
        object
            The last state, of this rank only: the states of the ranks are not combined.
        """
        return functools.reduce(reduce_func, self, initial_state)


def _generators(definition: Definition) -> list[str]:
    """Return warnings of functions of ``map`` that draw from a generator of the program: each rank has its own."""
    inner = [text for part in getattr(definition.source, "parts", ()) for text in _generators(part)]
    draws = [(step.fn, generators_of(step.fn)) for step in definition.transforms if isinstance(step, Map)]
    return inner + [
        f"the function {getattr(fn, '__qualname__', fn)} of map() draws from the random generator "
        f"{', '.join(map(repr, names))} of the program: each rank has a copy, so with one seed rows of other "
        "ranks get the same numbers, and a resume gives others; take map(fn, seed=...)"
        for fn, names in draws
        if names
    ]


def _description(transform: Transform) -> str:
    if isinstance(transform, Map):
        return str(transform)
    if isinstance(transform, Seeded) and not transform.seeded:
        # A drawn seed differs on each rank, until all take the seed of rank 0.
        return repr(replace(transform, seed=0))
    return repr(transform)


def _check_equal(descriptions: list[dict[str, Any]]) -> None:
    for rank, other in enumerate(descriptions):
        for field, value in other.items():
            if value != descriptions[0][field]:
                raise ValueError(
                    f"the replicas must distribute the same dataset, but its {field} is {value} on rank "
                    f"{rank} and {descriptions[0][field]} on rank 0: build it in the same way on all ranks, "
                    "also from the same seeds, or use distribute_datasets_from_function"
                )


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
