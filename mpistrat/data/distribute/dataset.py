"""Distributed datasets: global batches divided over the replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic

from mpistrat import absent, representation
from mpistrat.arrays.device import Device
from mpistrat.data.dataset import Dataset
from mpistrat.data.distribute.autoshard import Division, divide
from mpistrat.data.distribute.iterator import DistributedIterator
from mpistrat.data.distribute.state import Passes
from mpistrat.data.options import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    InputOptions,
    InputReplicationMode,
    check_input_options,
)
from mpistrat.data.pipeline.optional import Element
from mpistrat.data.rows.contracts import ranks_of_node, warn_together
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
            "pipeline": definition.transforms_in_words(),
            "auto_shard_policy": policy.name + ", balanced" * distribute.balance,
            "shuffle_memory": dataset.options().shuffle_memory,
        }
        if "data" in rc.debug and policy is not AutoShardPolicy.OFF and not definition.streamed:
            facts["checksum"] = definition.source.checksum()
        # One rank looks for generators, which takes 9 ms of imports, and warns for all.
        looks = ranks.size > 1 and ranks.rank == 0 and policy is not AutoShardPolicy.OFF
        generators = definition.warnings_of_generators() if looks else []
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


def _check_equal(descriptions: list[dict[str, Any]]) -> None:
    for rank, other in enumerate(descriptions):
        for field, value in other.items():
            if value != descriptions[0][field]:
                raise ValueError(
                    f"the replicas must distribute the same dataset, but its {field} is {value} on rank "
                    f"{rank} and {descriptions[0][field]} on rank 0: build it in the same way on all ranks, "
                    "also from the same seeds, or use distribute_datasets_from_function"
                )
