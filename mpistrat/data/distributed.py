"""A dataset of global batches, shared by the replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mpistrat.data.contracts import Peers
from mpistrat.data.dataset import Dataset
from mpistrat.data.iterator import Distributed
from mpistrat.data.options import InputOptions, InputReplicationMode, check_input_options
from mpistrat.data.transforms import Map, Shuffle, Transform, drawn_seeds, with_drawn_seeds


class DistributedDataset(Distributed):
    """A dataset of global batches, of which each replica gets its part.

    Made by ``strategy.experimental_distribute_dataset(dataset)``, on all replicas. The number of steps
    is known here and is the same everywhere; iterating communicates nothing.

    Parameters
    ----------
    dataset : Dataset
        In global batches: ``.batch(...)`` must be among its transforms.
    topology : object with size, rank, all_gather_object and broadcast_object
        The replicas that share the dataset.
    options : InputOptions, optional
        Options of the input.

    Raises
    ------
    TypeError
        If ``dataset`` is no Dataset.
    ValueError
        If the dataset is not batched, if it differs between replicas, or if the policy of its options
        (see `AutoShardPolicy`) does not suit it.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> second_of_two = SimpleNamespace(size=2, rank=1, all_gather_object=lambda x: [x, x])
    >>> list(DistributedDataset(Dataset.range(7).batch(4), second_of_two))
    [array([2, 3]), array([6])]
    """

    def __init__(self, dataset: Dataset, topology: Peers, options: InputOptions | None = None):
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"only a mpistrat.data.Dataset can be distributed, not {type(dataset).__name__}: make one "
                "with Dataset.from_arrays or Dataset.from_hdf5"
            )
        check_input_options(options)
        if options is not None and options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA only has a meaning with distribute_datasets_from_function"
            )
        if dataset.batch_size is None:
            raise ValueError(
                f"{dataset} has single rows, and only global batches can be divided over replicas: "
                "call .batch(global_batch_size) first"
            )
        distribute = dataset.options().experimental_distribute
        policy = distribute.auto_shard_policy
        transforms, source = dataset._transforms, dataset._source
        mine = {
            "source": source.fingerprint(),
            "pipeline": [_description(each) for each in transforms],
            "auto_shard_policy": policy.name + ", balanced" * distribute.balance,
        }
        everyone = topology.all_gather_object((mine, drawn_seeds(transforms)))
        _check_equal([description for description, _ in everyone])
        source.agree(topology)
        transforms = with_drawn_seeds(transforms, everyone[0][1])
        super().__init__(dataset._divided(transforms, topology), topology, dataset.options().prefetch)


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
                    f"{rank} and {descriptions[0][what]} on rank 0: build it alike on all ranks, or use "
                    "distribute_datasets_from_function"
                )
