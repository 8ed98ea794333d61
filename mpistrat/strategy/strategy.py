"""The base class of strategies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from mpistrat import absent, context, data, nest, representation
from mpistrat.collectives import structures
from mpistrat.collectives.arena import buffers_like
from mpistrat.data import undistributed
from mpistrat.monitor import stragglers
from mpistrat.monitor.stragglers import RankStatistics
from mpistrat.record import flight_record
from mpistrat.replicas import ReplicaGroup, random_stream
from mpistrat.runtime.agreement.collective_lock import collective_call
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.strategy import keras_models
from mpistrat.strategy.collectives import Collectives
from mpistrat.strategy.former import FormerNames, RunOptions
from mpistrat.strategy.local_replicas import run_replicas, split_by_replica
from mpistrat.strategy.replica_context import components, components_but_variables, regrouped
from mpistrat.values import DistributedValues, PerReplica, ValueContext

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Self

    from mpistrat.collectives.between_groups import BetweenGroups
    from mpistrat.data import Dataset, DistributedDataset, InputContext, InputOptions
    from mpistrat.data.pipeline.optional import Element
    from mpistrat.engine import Engine
    from mpistrat.runtime.topology import Topology
    from mpistrat.strategy.extended import StrategyExtended

_collective_call = collective_call(attrgetter("_extended.engine.topology"))
_Result = TypeVar("_Result")
Owner = TypeVar("Owner", bound=context.AnyStrategy)


class Scope(Generic[Owner]):
    """A context that makes its strategy current; `Strategy.scope` returns it."""

    __slots__ = ("_strategy",)

    def __init__(self, strategy: Owner):
        self._strategy = strategy

    def __enter__(self) -> Owner:
        context.require_cross_replica(self._strategy, "scope", "enter it outside of run")
        keras_models.watch()
        context.stack().append(self._strategy.extended.cross_replica_mode)
        return self._strategy

    def __exit__(self, *exc_info: object) -> None:
        context.stack().pop()


class Strategy(Collectives, FormerNames):
    """The replicas of a program and how they work together. Use one of the subclasses.

    What it makes, distributes or combines outside of `run` raises RuntimeError in a replica context, and while another
    strategy is current.

    Parameters
    ----------
    extended : StrategyExtended
        The part of the strategy that libraries use.

    Examples
    --------
    >>> import mpistrat
    >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     total = mpistrat.Variable(0.0, aggregation=mpistrat.VariableAggregation.SUM)
    >>> _ = strategy.run(lambda: total.assign_add(1.0))
    >>> float(total) == strategy.num_replicas_in_sync
    True
    """

    def __init__(self, extended: StrategyExtended):
        self._extended = extended

    if not TYPE_CHECKING:  # a type checker must find wrong names itself

        def __getattr__(self, name: str) -> Any:
            return absent.of_object(self, name, absent.OF_STRATEGY)

    # --- replicas --------------------------------------------------------------------

    @property
    def extended(self) -> StrategyExtended:
        """The part of this strategy that libraries use."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._extended.engine.replicas.size

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that the strategy was given, or None."""
        return None

    @property
    def is_chief(self) -> bool:
        """Whether this is replica 0, which writes files and reports."""
        return self._extended.engine.replicas.is_chief

    @property
    def comm(self) -> Any:
        """The ``mpi4py`` communicator of the replicas, for your own MPI calls.

        The strategy's collectives use private duplicates, so the two never mix.
        """
        return self._extended.engine.topology.parent

    def rng(self, seed: int | Sequence[int]) -> np.random.Generator | Any:
        """Return a random generator of this replica; of several, outside of `run`, a PerReplica. Never communicates.

        The streams of the replicas are independent. Each depends on the seed and on the number of the replica alone:
        not on the number of replicas, nodes or devices. The replicas of several groups are numbered one after another.
        The generator is ``Generator(PCG64(SeedSequence(seed, spawn_key=(replica,))))``, so it can be made again without
        this library.

        Its state is ``rng.bit_generator.state``, a dict that JSON can hold. To continue a stream, save the state of
        each replica, and assign it again.

        Parameters
        ----------
        seed : int or sequence of int
            Give the same on every replica.

        Raises
        ------
        TypeError
            If the seed is not an int or a sequence of ints.
        ValueError
            If a number is negative.

        Examples
        --------
        >>> import mpistrat
        >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
        >>> if strategy.is_chief:
        ...     print(strategy.rng(seed=42).integers(100, size=3).tolist())
        [49, 91, 58]
        """
        replica = context.current().replica_context
        replicas, groups = self._extended.engine.replicas, self._extended.engine.between_groups
        # The replicas of several groups are numbered one after another.
        before = 0 if groups is None else groups.replicas_before
        if replica is not None and replica.strategy is self:
            return random_stream(seed, before + replica.replica_id_in_sync_group)
        if self._extended.meeting is None and not replicas.is_virtual:
            return random_stream(seed, before + replicas.first)
        return PerReplica([random_stream(seed, number) for number in replicas.local])

    def barrier(self) -> None:
        """Wait until all replicas have called this."""
        self._extended.engine.all_ranks.barrier()

    def agree(self, ok: bool) -> bool:
        """Return whether ``ok`` is true on every replica. Collective.

        A replica that catches an error can tell the others this way, so that all take the same branch.

        Examples
        --------
        >>> import mpistrat
        >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
        >>> try:
        ...     ok = 1 / 2 > 0
        ... except ZeroDivisionError:
        ...     ok = False
        >>> strategy.agree(ok)
        True
        """
        return self._extended.engine.all_ranks.all_true(ok)

    def chief_first(self) -> AbstractContextManager[bool]:
        """Return a context whose block replica 0 runs first, then all other replicas.

        It yields whether this is replica 0.

        Raises
        ------
        RuntimeError
            On the other replicas, if replica 0 left its block with an error.

        Examples
        --------
        >>> import mpistrat
        >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
        >>> with strategy.chief_first() as first:
        ...     if first:
        ...         pass  # make the files that all replicas read
        """
        return _ChiefFirst(self._extended.engine)

    # --- contexts --------------------------------------------------------------------

    def scope(self) -> Scope[Self]:
        """Return a context in which this strategy is current and creates all variables.

        It yields the strategy. The context may be kept and entered again.

        Raises
        ------
        RuntimeError
            When entered in a replica context, or while another strategy is current.
        """
        return Scope(self)

    def run(
        self,
        fn: Callable[..., _Result],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> _Result | Any:
        """Run a function once per replica: this process runs it for its own replica.

        A rank that plays several replicas runs it for one after another. At a cross-replica call a replica waits for
        the others, each in a thread of its own. One thread runs at a time.

        Parameters
        ----------
        fn : callable
        args, kwargs
            The function gets this replica's component of distributed values in them, at any depth. Variables and
            all other arguments are passed unchanged.
        options : RunOptions, optional

        Returns
        -------
        Any
            The result of ``fn`` on this replica. With ``virtual_replicas``, a PerReplica in place of each leaf of it,
            or None. With several ``devices`` for this rank, a PerReplica where replicas return different objects.

        Raises
        ------
        ValueError
            If ``args`` is neither a list nor a tuple.
        RuntimeError
            In a replica context, or while another strategy is current. On every rank, if the replicas of a rank make
            different cross-replica calls.
        """
        if not isinstance(args, (list, tuple)):
            raise ValueError(f"args must be a tuple or list, not {args!r}: for one argument write args=(value,)")
        extended = self._extended
        stack = context.local.stack
        depth = len(stack)
        # Fast path: in the scope of this strategy, or in none, there is nothing to check.
        if depth and stack[-1] is not extended.cross_replica_mode:
            context.require_cross_replica(self, "run", "a replica function cannot run another")
        if extended.meeting is not None:
            result = run_replicas(extended, fn, args, kwargs)
            flight_record.step(flight_record.RUN)
            return result
        if args:
            if undistributed.arrays:
                replicas = extended.engine.replicas
                # A batch of a dataset that was not distributed: all replicas would compute the same rows.
                undistributed.warn_of(args, replicas.first, replicas.size)
            args = [*map(components_but_variables, args)]
        if kwargs:
            kwargs = {name: components_but_variables(arg) for name, arg in kwargs.items()}
        try:
            stack.append(extended.replica_context.mode)
            result = fn(*args, **kwargs) if kwargs else fn(*args)
        finally:
            del stack[depth:]  # not pop: a function that failed may have left contexts behind
        flight_record.step(flight_record.RUN)
        return regrouped((result,), always=True) if extended.wraps and result is not None else result

    def experimental_statistics(self) -> tuple[RankStatistics, ...]:
        """Return how long the steps of each rank took, and which ranks the others wait for. Collective.

        A step is one ``apply_gradients``, else one `run`, or what `mpistrat.experimental.step` says.

        Returns
        -------
        tuple of RankStatistics
            In the order of ranks. Without a flight record (``MPISTRAT_RECORD=0``) they count no steps.

        Examples
        --------
        >>> import mpistrat
        >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
        >>> for _ in range(3):
        ...     _ = strategy.run(lambda: sum(range(1000)))
        >>> [replica.slow for replica in strategy.experimental_statistics()] == [False] * strategy.num_replicas_in_sync
        True
        """
        return stragglers.of_all(self._extended.engine.topology)

    # --- values: `Collectives` combines them -----------------------------------------

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a value in this process, as a tuple: of one where a rank plays one replica.

        Examples
        --------
        >>> import mpistrat
        >>> mpistrat.MultiWorkerMirroredStrategy().experimental_local_results(3)
        (3,)
        """
        replicas = self._extended.engine.replicas
        if replicas.count > 1 and nest.holds(nest.flatten(value)[0], DistributedValues):
            return tuple(split_by_replica(value, replicas.count))
        return (components(value),)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return a PerReplica value whose component for each replica is ``value_fn(ValueContext)``."""
        context.require_cross_replica(self, "experimental_distribute_values_from_function", "call it before run")
        replicas = self._extended.engine.replicas
        return PerReplica([value_fn(ValueContext(replica, replicas.size)) for replica in replicas.local])

    def group(self, value: Any, name: str | None = None) -> None:
        """Do nothing: calls compute their results at once. Kept for code written for ``tf.distribute``."""

    # --- input -----------------------------------------------------------------------

    def experimental_distribute_dataset(
        self, dataset: Dataset[Element], options: InputOptions | None = None
    ) -> DistributedDataset[Element]:
        """Split the global batches of a dataset between the replicas. Collective.

        Every rank passes an equal dataset and then reads only the rows of its replicas. All replicas take the same
        number of steps. A replica without rows in a step gets an empty batch.

        Parameters
        ----------
        dataset : Dataset
            A dataset whose elements are global batches.
        options : InputOptions, optional

        Returns
        -------
        DistributedDataset

        Raises
        ------
        ValueError
            On every replica, if the dataset has no batches or its files do not match.
        """
        context.require_cross_replica(self, "experimental_distribute_dataset", "call it before run")
        engine = self._extended.engine
        if engine.between_groups is not None:
            dataset = _batches_of_group(dataset, engine.between_groups, engine.all_ranks)
        return data.DistributedDataset(
            dataset, engine.topology, options, engine.device, engine.replicas, engine.all_ranks
        )

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset[Element]], options: InputOptions | None = None
    ) -> DistributedDataset[Element]:
        """Return the datasets of per-replica batches that ``dataset_fn(InputContext)`` makes, one per pipeline.

        Parameters
        ----------
        dataset_fn : callable
            Called once on each rank, or for each virtual replica.
        options : InputOptions, optional

        Returns
        -------
        DistributedDataset

        Raises
        ------
        TypeError
            On every replica, if ``dataset_fn`` does not return a Dataset on one of them.
        """
        context.require_cross_replica(self, "distribute_datasets_from_function", "call it before run")
        engine = self._extended.engine
        if engine.between_groups is not None:  # each group gets rows of its own
            ranks, replicas = engine.all_ranks, ReplicaGroup(engine.all_ranks)
        else:
            ranks, replicas = engine.topology, engine.replicas
        return data.DistributedDatasetsFromFunction(
            dataset_fn, ranks, options, engine.device, replicas, engine.replicas.size
        )

    # --- buffers ---------------------------------------------------------------------

    @_collective_call
    def experimental_buffers_like(self, tree: Any) -> Any:
        """Return zeroed arrays of the same shapes and dtypes, which reductions change in place. Collective.

        The arrays live in memory that the ranks of a node share. Buffers for arrays on a GPU live on that GPU.
        Values written there (by ``out=``, for example) are reduced without a copy, several times as fast as in
        other arrays. `ReplicaContext.all_reduce`, `reduce` and the optimizers leave the result *in these arrays*
        and return them. Non-contiguous views, and means of integers, are reduced into new arrays.

        The memory is freed with the last array of the tree; it outlives the strategy.

        Parameters
        ----------
        tree : array, variable, or nested structure of these
            Shapes and dtypes must be equal on all replicas.

        Returns
        -------
        Any
            The same structure.

        Raises
        ------
        ValueError
            On every replica, if structures, shapes or dtypes differ between replicas.
        TypeError
            If an array holds Python objects.

        Examples
        --------
        >>> import mpistrat, numpy as np
        >>> strategy = mpistrat.MultiWorkerMirroredStrategy()
        >>> gradient = strategy.experimental_buffers_like(np.zeros((2, 3), np.float32))
        >>> _ = np.multiply(2.0, np.ones((2, 3)), out=gradient, casting="same_kind")
        >>> total = strategy.reduce("MEAN", gradient, axis=None)
        >>> total is gradient, float(total[0, 0])
        (True, 2.0)
        """
        engine = self._extended.engine
        return buffers_like(tree, engine.topology, engine.device)

    # --- copies ----------------------------------------------------------------------

    def __copy__(self) -> Strategy:
        raise RuntimeError("a strategy cannot be copied shallowly: use the one object, or copy.deepcopy")

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        new = object.__new__(type(self))
        # Before its parts, which refer to the strategy.
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            setattr(new, name, copy.deepcopy(value, memo))
        return new

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: create a strategy in the process that is to have one")

    def _facts(self) -> dict[str, Any]:
        engine = self._extended.engine
        return {
            "replicas": self.num_replicas_in_sync,
            "nodes": len(engine.topology.nodes),
            "replica": engine.replicas.first,
            "device": engine.devices[0],
        }

    def __repr__(self) -> str:
        return representation.text(type(self).__name__, {**self._facts(), "id": hex(id(self))})

    def _repr_html_(self) -> str:
        return representation.table(type(self).__name__, self._facts())


def _batches_of_group(dataset: Any, groups: BetweenGroups, all_ranks: Topology) -> Any:
    """Return this group's share of a dataset: every ``count``-th batch."""
    if not isinstance(dataset, data.Dataset) or dataset.batch_size is None:
        return dataset  # refused by `DistributedDataset`
    length = dataset.cardinality()
    structures.agree(all_ranks, "the length of a dataset for groups", length)
    if length == data.UNKNOWN_CARDINALITY:
        raise ValueError(
            f"{dataset} has an unknown number of batches, which cannot be dealt evenly to {groups.count} groups: use "
            "distribute_datasets_from_function"
        )
    if length != data.INFINITE_CARDINALITY:
        # As many batches for each group: a group with more would wait for the others for ever.
        dataset = dataset.take(length // groups.count * groups.count)
    return dataset.shard(groups.count, groups.index)


class _ChiefFirst:
    """A context whose block the chief runs first. See `Strategy.chief_first`."""

    def __init__(self, engine: Engine):
        self._topology, self._replicas = engine.all_ranks, engine.replicas
        self._mismatches = 0

    def __enter__(self) -> bool:
        topology = self._topology
        if self._replicas.is_chief:
            self._mismatches = topology.lock.mismatches
            return True
        failure = topology.broadcast_object(None, name="chief_first")
        if failure is not None:
            raise RuntimeError(f"replica {self._replicas.first}: replica 0 failed in chief_first(): {failure}")
        return False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        topology = self._topology
        if not self._replicas.is_chief:
            return
        if isinstance(error, MismatchError) and topology.lock.mismatches != self._mismatches:
            return  # the others waited here, met a collective of the block, and have raised, too
        topology.broadcast_object(None if error is None else repr(error), name="chief_first")
