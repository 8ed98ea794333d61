"""Distributed datasets: global batches divided over the replicas, or a dataset for each replica by a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpistrat.data.dataset import Dataset
from mpistrat.data.distribute.autoshard import Division, OwnDataset, divide
from mpistrat.data.distribute.iterator import DistributedIterator, Passes
from mpistrat.data.distribute.until_all_end import OwnUntilAllEnd, divide_until_all_end
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
from mpistrat.data.pipeline.transforms import Map, Shuffle, Transform
from mpistrat.data.rows.contracts import ranks_of_node
from mpistrat.replicas import ReplicaGroup
from mpistrat.runtime.device import Device

if TYPE_CHECKING:
    from mpistrat.runtime.topology import Topology


class Distributed:
    """The base of both kinds of distributed datasets: a division of rows, iterated epoch after epoch."""

    def __init__(
        self,
        division: Division,
        ranks: Topology,
        prefetch: int | None,
        options: InputOptions | None,
        device: Device,
    ):
        self._passes = Passes(division, ranks, prefetch)
        if options is None or options.experimental_fetch_to_device:
            self._passes.device = device

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._passes)

    def state(self) -> dict[str, Any]:
        """Return the position of the newest iterator; see `DistributedIterator.state`.

        Returns
        -------
        dict
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
        """Number of steps of an epoch, equal on all replicas.

        `INFINITE_CARDINALITY` for an endless dataset, `UNKNOWN_CARDINALITY` for a dataset made of an iterable.
        """
        return self._passes.division.cardinality

    @property
    def element_spec(self) -> Any:
        """Structure of this replica's batches, with an `ArraySpec` for each array.

        With several replicas, None stands for the number of rows, because their pieces may differ by one row.
        """
        return self._passes.element_spec

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold this replica's batches of one epoch into a state.

        Parameters
        ----------
        initial_state : object
            The state before the first batch.
        reduce_func : callable
            Called with the state and a batch. Returns the next state.

        Returns
        -------
        object
            The last state, of this replica only: the states of the replicas are not combined.
        """
        state = initial_state
        for batch in self:
            state = reduce_func(state, batch)
        return state


class DistributedDataset(Distributed):
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

    def __init__(
        self,
        dataset: Dataset,
        ranks: Topology,
        options: InputOptions | None = None,
        device: Device = Device("cpu"),  # noqa: B008 - a tuple
        replicas: ReplicaGroup | None = None,
    ):
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"only a mpistrat.data.Dataset can be distributed, not {type(dataset).__name__}: make one "
                "with Dataset.from_arrays or Dataset.from_hdf5"
            )
        check_input_options(options)
        if options is not None and options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA has a meaning only with distribute_datasets_from_function: use "
                "PER_WORKER"
            )
        if dataset.batch_size is None:
            raise ValueError(
                f"{dataset} has single rows, but only global batches can be divided over replicas: "
                "call .batch(global_batch_size) first"
            )
        distribute = dataset.options().experimental_distribute
        policy = distribute.auto_shard_policy
        definition = dataset.definition
        mine = {
            "source": definition.source.fingerprint(),
            "pipeline": [_description(each) for each in definition.transforms],
            "auto_shard_policy": policy.name + ", balanced" * distribute.balance,
            "shuffle_memory": dataset.options().shuffle_memory,
        }
        everyone = ranks.all_gather_object((mine, definition.seeds()))
        _check_equal([description for description, _ in everyone])
        definition.source.agree(ranks)
        division = _division(definition.with_drawn(everyone[0][1]), ranks, replicas or ReplicaGroup(ranks))
        super().__init__(division, ranks, definition.options.prefetch, options, device)


def _division(definition: Definition, ranks: Topology, replicas: ReplicaGroup) -> Division:
    distribute = definition.options.experimental_distribute
    policy = distribute.auto_shard_policy
    if definition.streamed and policy is AutoShardPolicy.FILE:
        raise ValueError(
            f"AutoShardPolicy.FILE needs a dataset of files, but this one is made of {definition.source}: "
            "use AutoShardPolicy.DATA"
        )
    ready = definition.ready(ranks_of_node(ranks), ranks)
    if definition.streamed:
        return divide_until_all_end(policy, ready.source, ready.transforms, replicas, ranks)
    return divide(policy, ready.source, ready.transforms, replicas, distribute.balance)


def _description(transform: Transform) -> str:
    if isinstance(transform, Map):
        return "map"
    if isinstance(transform, Shuffle) and not transform.seeded:
        return repr(replace(transform, seed=0))
    return repr(transform)


def _check_equal(descriptions: list[dict[str, Any]]) -> None:
    for rank, other in enumerate(descriptions):
        for what, value in other.items():
            if value != descriptions[0][what]:
                raise ValueError(
                    f"the replicas must distribute the same dataset, but its {what} is {value} on rank "
                    f"{rank} and {descriptions[0][what]} on rank 0: build it in the same way on all ranks, or use "
                    "distribute_datasets_from_function"
                )


class DistributedDatasetsFromFunction(DistributedDataset):
    """The datasets that a function made, one for each replica, iterated with equal numbers of steps.

    Made by ``strategy.distribute_datasets_from_function(dataset_fn)``, on all replicas. The library does not
    divide these datasets. The function does that itself, for example with `Dataset.shard`. A replica with a
    shorter dataset gets empty batches until the longest ends. Shuffles without a seed take the seeds of
    replica 0, so that ``shuffle()`` before ``shard()`` loses no row.

    Parameters
    ----------
    dataset_fn : callable
        Called with an `InputContext`. Returns a Dataset, in batches of the replica's own size.
    ranks : Topology
        The ranks that call the function.
    options : InputOptions, optional
        Options of the input.
    device : Device, optional
        The device that batches are fetched to, unless the options disable that. By default the host.
    replicas : ReplicaGroup, optional
        Which rank plays which replica; by default each rank plays one.

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
    ):
        if not callable(dataset_fn):
            raise TypeError(f"dataset_fn must be a function of an InputContext, not {dataset_fn!r}")
        check_input_options(options)
        replicas = replicas or ReplicaGroup(ranks)
        dataset: Any = None
        failure: Exception | None = None
        report: dict[str, Any] = {"length": None, "batched": True, "seeds": [], "kind": "", "failure": ""}
        try:
            dataset = dataset_fn(InputContext(replicas.size, replicas.first, replicas.size))
            if isinstance(dataset, Dataset):
                report["length"] = dataset.cardinality()
                report["batched"] = dataset.batch_size is not None
                report["seeds"] = dataset.definition.seeds()
            else:
                report["kind"] = type(dataset).__name__
        except Exception as error:
            failure = error
            report["failure"] = f"{type(error).__name__}: {error}"
        reports = ranks.all_gather_object(report)
        if failure is not None:
            raise failure
        _check(reports)
        lengths = [each["length"] for each in reports]
        ready = dataset.definition.with_drawn(reports[0]["seeds"]).ready(ranks_of_node(ranks))
        own: Division
        if UNKNOWN_CARDINALITY in lengths:
            own = OwnUntilAllEnd(ready.source, ready.transforms, replicas, ranks, ready.plan)
        else:
            length = None if INFINITE_CARDINALITY in lengths else max(lengths)
            own = OwnDataset(ready.source, ready.transforms, replicas, length)
        Distributed.__init__(self, own, ranks, ready.options.prefetch, options, device)


def _check(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        if report["failure"]:
            raise RuntimeError(f"dataset_fn raised on rank {rank}: {report['failure']}")
    for rank, report in enumerate(reports):
        if report["kind"]:
            raise TypeError(
                f"dataset_fn must return a mpistrat.data.Dataset, but on rank {rank} it returned "
                f"{report['kind']}"
            )
    lengths = [report["length"] for report in reports]
    unbatched = [rank for rank, report in enumerate(reports) if not report["batched"]]
    if unbatched and (len(set(lengths)) > 1 or UNKNOWN_CARDINALITY in lengths):
        raise ValueError(
            "datasets of unequal or unknown length must be batched, so that empty batches can follow a short one: "
            f"rank {unbatched[0]} has single rows, and the lengths by rank are {lengths}; call "
            ".batch(context.get_per_replica_batch_size(...))"
        )
