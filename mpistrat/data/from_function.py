"""Datasets that a function of the program makes, one for each replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpistrat.data.dataset import Dataset
from mpistrat.data.distribute.autoshard import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Division, OwnDataset
from mpistrat.data.distribute.until_all_end import OwnUntilAllEnd
from mpistrat.data.distributed import Distributed, DistributedDataset
from mpistrat.data.options import InputContext, InputOptions, check_input_options
from mpistrat.data.rows.contracts import Peers, ranks_of_node
from mpistrat.runtime.device import Device


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
    topology : object with size, rank, all_gather_object and broadcast_object
        The replicas.
    options : InputOptions, optional
        Options of the input.
    device : Device, optional
        The device that batches are fetched to, unless the options disable that. By default the host.

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
        topology: Peers,
        options: InputOptions | None = None,
        device: Device = Device("cpu"),  # noqa: B008 - a tuple
    ):
        if not callable(dataset_fn):
            raise TypeError(f"dataset_fn must be a function of an InputContext, not {dataset_fn!r}")
        check_input_options(options)
        dataset: Any = None
        failure: Exception | None = None
        report: dict[str, Any] = {"length": None, "batched": True, "seeds": [], "kind": "", "failure": ""}
        try:
            dataset = dataset_fn(InputContext(topology.size, topology.rank, topology.size))
            if isinstance(dataset, Dataset):
                report["length"] = dataset.cardinality()
                report["batched"] = dataset.batch_size is not None
                report["seeds"] = dataset.definition.seeds()
            else:
                report["kind"] = type(dataset).__name__
        except Exception as error:
            failure = error
            report["failure"] = f"{type(error).__name__}: {error}"
        reports = topology.all_gather_object(report)
        if failure is not None:
            raise failure
        _check(reports)
        lengths = [each["length"] for each in reports]
        ready = dataset.definition.with_drawn(reports[0]["seeds"]).ready(ranks_of_node(topology))
        own: Division
        if UNKNOWN_CARDINALITY in lengths:
            own = OwnUntilAllEnd(ready.source, ready.transforms, topology, ready.plan)
        else:
            length = None if INFINITE_CARDINALITY in lengths else max(lengths)
            own = OwnDataset(ready.source, ready.transforms, topology, length)
        Distributed.__init__(self, own, topology, ready.options.prefetch, options, device)


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
