"""The engine of a strategy: what variables, data and training need to communicate and to place values."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpistrat import nest, verify
from mpistrat.arrays import arrays
from mpistrat.arrays.device import Device
from mpistrat.collectives import CollectiveAllReduce, CommunicationOptions, CrossDeviceOps, structures
from mpistrat.collectives.arena import Arenas
from mpistrat.collectives.ops.of_replicas import ReplicasAllReduce
from mpistrat.replicas import ReplicaGroup
from mpistrat.runtime.topology import SingleRankTopology, Topology
from mpistrat.values import Mirrored, reducible

if TYPE_CHECKING:
    import numpy as np

    from mpistrat.collectives.between_groups import BetweenGroups
    from mpistrat.collectives.operations import Op
    from mpistrat.collectives.reduction import Key, Reduction
    from mpistrat.mesh import Mesh


class Engine:
    """The ranks, replicas, cross-device ops, device and options of a strategy.

    A strategy makes one, for its variables, datasets, optimizers and metrics. The engine knows none of their classes.

    By default its ranks are this process alone, its device is the host, its ops choose the fastest algorithm for each
    message, and each rank plays one replica. The options apply to all collectives.

    ``topology`` has the ranks that combine values. ``all_ranks`` has all ranks of the program, which save and end at
    one step. Where a replica is several ranks, a rank combines values with the ranks of its position in other replicas.

    The attribute ``ops`` is bound to the ranks: a `ReplicasAllReduce`, unless each rank plays the replica of its own
    number. ``arenas`` is the memory of buffers that are reduced in place. ``joins_arrays`` says whether a caller may
    join arrays before they are reduced: neither hooks nor pack sizes count them. ``variable_device`` is the device of
    new variables, and ``sends_initial_values`` says whether these get the value of rank 0. ``between_groups`` is set
    where the ranks are groups that exchange now and then: ``topology`` and ``replicas`` are then those of this
    group. ``mesh`` is set where a replica is several ranks.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        device: Device | None = None,
        ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
        replicas: ReplicaGroup | None = None,
        all_ranks: Topology | None = None,
    ):
        self.options = options or CommunicationOptions()
        is_default = self.options.algorithm is None and self.options.implementation != "auto"
        if replicas is not None and replicas.is_virtual and is_default:
            self.options = CommunicationOptions(implementation="tree").merge(self.options)
        self.topology: Topology = (topology or SingleRankTopology()).limited(self.options.timeout_seconds)
        self.all_ranks = all_ranks or self.topology
        self.replicas = replicas or ReplicaGroup(self.topology)
        verify.watch(self.topology)
        self.device = (device or Device("cpu")).use()
        self.devices: tuple[str, ...] = (str(self.device),)
        self.arenas = self.topology.slot(Arenas)
        if not self.replicas.by_rank:
            ops = ReplicasAllReduce(self.replicas.blocks)
        self.ops = (ops or CollectiveAllReduce()).bound_to(self.topology)
        self.joins_arrays = self.ops.joins_arrays(self.options)
        self.variable_device = self.device
        self.sends_initial_values = True
        self.between_groups: BetweenGroups | None = None
        self.mesh: Mesh | None = None
        self._unnamed = 0

    @property
    def with_equal_start(self) -> Topology:
        """The ranks whose copies of a variable begin with one value."""
        return self.topology if self.between_groups is None else self.all_ranks

    def merged(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Return the options of a call. Options that it leaves unset are the strategy's."""
        return self.options if options is None else self.options.merge(options)

    # --- reductions ------------------------------------------------------------------

    def all_reduce(
        self, op: Op, values: list[Any], options: CommunicationOptions | None = None, form: Hashable = None
    ) -> list[Any]:
        """Combine the values of all replicas: arrays of any library, numbers and sparse rows.

        ``values`` are this replica's plain values, the leaves of a structure. The ranks compare its ``form``. Raise
        MismatchError on every rank if the values differ in number, kind, dtype or shape.
        """
        if self.device.kind != "cpu":
            on_gpu = [arrays.to_cupy(value) for value in values if arrays.on_gpu(value)]
            if on_gpu:
                arrays.require_one_device(on_gpu, self.device)
        options = self.options if options is None else self.options.merge(options)
        return self.ops.all_reduce(op, values, options, form)

    def joined_all_reduce(self, op: Op, key: Key, out: np.ndarray, form: Hashable) -> Reduction | None:
        """Return a prepared all-reduce of arrays on the host into one flat array, if there is one.

        See `CrossDeviceOps.joined_all_reduce`.
        """
        return self.ops.joined_all_reduce(op, key, out, self.options, form)

    def contributions(self, op: Op, leaves: list[Any], form: Hashable) -> list[Any]:
        """Return what this replica contributes to a reduction.

        Raise MismatchError on every rank if a leaf is mirrored on some ranks only: a mirrored value is not sent.
        """
        if nest.holds(leaves, Mirrored):
            kinds = tuple(map(structures.kind_across_replicas, leaves))
            structures.agree(self.topology, "all_reduce", op.name, form, kinds)
        return [reducible(op, leaf) for leaf in leaves]

    def holds_buffer(self, values: Sequence[Any]) -> bool:
        """Return whether one of the arrays is reduced in place."""
        arenas = self.arenas
        return bool(arenas) and any(id(getattr(value, "base", None)) in arenas for value in values)

    # --- variables -------------------------------------------------------------------

    @contextmanager
    def variables_on_host(self) -> Iterator[None]:
        """Context in which new variables live on the host: numbers that the program reads in every step."""
        before, self.variable_device = self.variable_device, Device("cpu")
        try:
            yield
        finally:
            self.variable_device = before

    @contextmanager
    def equal_initial_values(self) -> Iterator[None]:
        """Context in which all ranks give new variables equal values, so that these need no broadcast."""
        before, self.sends_initial_values = self.sends_initial_values, False
        try:
            yield
        finally:
            self.sends_initial_values = before

    def name_of_variable(self, name: str | None) -> str:
        """Return the name of a new variable: ``name``, or the next of ``Variable``, ``Variable_1``, ..."""
        if name is not None:
            return name
        self._unnamed += 1
        return "Variable" if self._unnamed == 1 else f"Variable_{self._unnamed - 1}"
