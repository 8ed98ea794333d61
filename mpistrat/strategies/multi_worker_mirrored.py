"""The strategy for all ranks, on any number of nodes."""

from __future__ import annotations

import os
import warnings
from types import NoneType
from typing import Any, NoReturn

import numpy as np

from mpistrat import cluster_resolver as resolvers
from mpistrat.cluster_resolver.own_device import own_device
from mpistrat.collectives import CommunicationImplementation, CommunicationOptions
from mpistrat.collectives.algorithms.choose import Choice
from mpistrat.collectives.between_groups import BetweenGroups
from mpistrat.collectives.compression import LossyCompression
from mpistrat.mesh import REPLICA, Mesh, MeshAxis
from mpistrat.process import mpi
from mpistrat.replicas import ReplicaGroup
from mpistrat.representation import require
from mpistrat.runtime import affinity
from mpistrat.runtime.topology import Topology
from mpistrat.strategies.dealing import replicas_of, require_hosts
from mpistrat.strategy import Strategy, StrategyExtended

_NOT_OUTER = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "gradient_accumulation_steps",
    "shard_state",
)


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous data parallelism over all ranks of the job, with mirrored variables.

    Parameters
    ----------
    cluster_resolver : ClusterResolver, optional
        Ranks and nodes according to the environment. MPI decides. The two are compared: number of ranks and of
        nodes, ranks per node, and this rank's place. By default only one case is checked: a process that runs alone
        must not have a ``TF_CONFIG`` for several tasks.
    communication_options : CommunicationOptions, optional
        Options of all collectives of the strategy.
    comm : mpi4py.MPI.Intracomm, optional
        Communicator of the ranks to use; by default all ranks.
    device : str, optional
        Device of this rank's variables: ``"cpu"``, ``"cuda"`` for this rank's GPU of its node, or
        ``"cuda:1"`` for GPU 1. ``"auto"`` is a GPU if every rank sees one, else the host. By default
        ``mpistrat.rc.device`` (MPISTRAT_DEVICE).
    virtual_replicas : int, optional
        The number of replicas; by default one for each rank. They are dealt to the ranks in blocks, so that a rank
        plays several. With the same number, training gives the same weights bit by bit on any number of ranks. See
        "Reproducibility" in the documentation.
    mesh : Mesh, optional
        Ranks with an axis ``replica``: a replica is the ranks of one place on it. All of them get its rows. Values are
        combined between the ranks of the same place in their replicas. In place of ``comm`` and ``virtual_replicas``.
    groups : "node" or MeshAxis, optional
        Ranks that are in sync in each step: the ranks of a node, or along an axis. ``num_replicas_in_sync`` counts
        the replicas of a group, values are combined inside of it, and each group reads batches of its own.
    sync_every : int
        After so many steps of an optimizer, the groups exchange weights. With 1, they exchange gradients in each step.
    outer_optimizer : Optimizer, optional
        What takes the mean change of the groups since their last exchange as a gradient of the weights, such as
        ``SGD(0.7, momentum=0.9, nesterov=True)`` (DiLoCo). By default the weights become their mean over the ranks.
    compression : PowerSGD or TopK, optional
        How groups send less than all numbers.

    Raises
    ------
    ValueError
        If ``communication_options`` is not a ``CommunicationOptions``. On every rank, if ``virtual_replicas`` is below
        the number of ranks or differs between them, or replicas of one rank are to share a GPU. If ``mesh`` has no axis
        ``replica``, or is given beside ``comm`` or ``virtual_replicas``. If ``groups`` is given beside ``mesh`` or
        ``virtual_replicas``, or an argument for groups without it, or ``outer_optimizer`` with ``sync_every=1``.
    TypeError
        If ``cluster_resolver`` is not a ``ClusterResolver``, ``virtual_replicas`` is not an int, or ``mesh`` is not a
        ``Mesh``.
    RuntimeError
        If this process is alone although its launcher started several tasks. On every rank, if the resolver and MPI
        contradict each other on a rank, or a rank lacks its device.

    Examples
    --------
    >>> strategy = MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     pass  # create variables here
    >>> strategy.num_replicas_in_sync
    1
    """

    def __init__(
        self,
        cluster_resolver: resolvers.ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        comm: Any = None,
        device: str | None = None,
        virtual_replicas: int | None = None,
        mesh: Mesh | None = None,
        groups: str | MeshAxis | None = None,
        sync_every: int = 1,
        outer_optimizer: Any = None,
        compression: LossyCompression | None = None,
    ):
        require(
            communication_options is None or isinstance(communication_options, CommunicationOptions),
            "communication_options must be CommunicationOptions",
            communication_options,
        )
        if cluster_resolver is not None and not isinstance(cluster_resolver, resolvers.ClusterResolver):
            raise TypeError(f"cluster_resolver must be a ClusterResolver object, not {cluster_resolver!r}")
        world = mpi.start().COMM_WORLD
        options = communication_options or CommunicationOptions()
        if mesh is not None:
            _check_mesh(mesh, comm, virtual_replicas)
            comm = mesh.parent
        comm = world if comm is None else comm
        if groups is not None and (mesh is not None or virtual_replicas is not None):
            raise ValueError("groups have a replica on each rank: leave out mesh and virtual_replicas")
        _check_exchange(groups, sync_every, outer_optimizer, compression)
        # Groups and meshes count the replicas of a part of the ranks; files and datasets concern all of them.
        all_ranks = topology = Topology.of(comm).limited(options.timeout_seconds)
        if mesh is not None or groups is not None:
            part = (
                mesh.comm(REPLICA)
                if mesh is not None
                else groups.comm
                if isinstance(groups, MeshAxis)
                else all_ranks.node
            )
            topology = Topology.of(part).limited(options.timeout_seconds)
        Choice.of(topology).load_measured_costs(topology)
        if cluster_resolver is None and world.size == 1 and os.environ.get("TF_CONFIG"):
            # One rank, with a TF_CONFIG that may be for several tasks: was it started without a launcher?
            _cross_check(resolvers.resolve(), topology, world)
        elif cluster_resolver is not None:
            _cross_check(cluster_resolver, all_ranks, world)
        if comm is world:
            affinity.warn_if_few_cores(all_ranks)
        exchange = None
        if groups is not None:
            exchange = BetweenGroups(topology, all_ranks, sync_every, compression, outer_optimizer, options)
            replicas = ReplicaGroup(topology, is_first=exchange.index == 0)
        elif mesh is None:
            replicas = replicas_of(topology, virtual_replicas)
        else:
            replicas = ReplicaGroup(topology, is_first=mesh.is_first_beside(REPLICA))
        # Over all ranks: groups, or replicas of a mesh, may share the GPUs of a node.
        own = own_device(all_ranks, device)
        require_hosts(replicas, [own])
        super().__init__(
            StrategyExtended(self, topology, own, communication_options=options, replicas=replicas, all_ranks=all_ranks)
        )
        self.extended.engine.between_groups, self.extended.engine.mesh = exchange, mesh
        self._resolver = cluster_resolver

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the strategy was given."""
        return self.extended.engine.mesh

    @property
    def cluster_resolver(self) -> resolvers.ClusterResolver:
        """Resolver that the strategy was given; else the environment's, or MPI's facts if the two differ.

        Examples
        --------
        >>> resolver = MultiWorkerMirroredStrategy().cluster_resolver
        >>> resolver.task_type, resolver.task_id
        ('worker', 0)
        """
        if self._resolver is None:
            from mpistrat.cluster_resolver.compare import resolver_of

            self._resolver = resolver_of(self.extended.engine.all_ranks)
        return self._resolver

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ValueError("MultiWorkerMirroredStrategy cannot be copied: create another on the same ranks")


def _check_mesh(mesh: Any, comm: Any, virtual_replicas: int | None) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a Mesh object, not {mesh!r}")
    if comm is not None or virtual_replicas is not None:
        raise ValueError("a mesh has its own ranks and replicas: leave out comm and virtual_replicas")
    mesh.axis(REPLICA)


def _check_exchange(groups: Any, sync_every: Any, outer_optimizer: Any, compression: Any) -> None:
    if not (groups is None or groups == "node" or isinstance(groups, MeshAxis)):
        raise ValueError(f'groups must be "node", the axis of a mesh, or None, not {groups!r}')
    if isinstance(sync_every, bool) or not isinstance(sync_every, (int, np.integer)):
        raise TypeError(f"sync_every must be an int, not {sync_every!r}")
    require(sync_every >= 1, "sync_every must be at least 1", sync_every)
    if outer_optimizer is not None:
        if not hasattr(outer_optimizer, "slots"):
            raise TypeError(f"outer_optimizer must be an optimizer of mpistrat.optimizers, not {outer_optimizer!r}")
        refused = [name for name in _NOT_OUTER if outer_optimizer.get_config().get(name)]
        if refused:
            raise ValueError(f"an outer optimizer takes mean changes as they are: leave out {', '.join(refused)}")
    if not isinstance(compression, (LossyCompression, NoneType)):
        raise TypeError(f"compression must be PowerSGD or TopK, not {compression!r}")
    if groups is None and (sync_every > 1 or outer_optimizer is not None or compression is not None):
        raise ValueError('sync_every, outer_optimizer and compression are for groups: give groups="node", or an axis')
    if sync_every == 1 and outer_optimizer is not None:
        raise ValueError("an outer optimizer takes what weights change in several steps: give sync_every above 1")


def _cross_check(resolver: resolvers.ClusterResolver, topology: Topology, world: Any) -> None:
    from mpistrat.cluster_resolver.compare import cross_check  # most programs give no resolver

    cross_check(resolver, topology, world)


class _AlsoByNewName(type):
    """A metaclass: ``isinstance`` is true for every multi-worker strategy, created by either name."""

    def __instancecheck__(cls, instance: object) -> bool:
        wanted = MultiWorkerMirroredStrategy if cls is FormerMultiWorkerMirroredStrategy else cls
        return issubclass(type(instance), wanted)


class FormerMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy, metaclass=_AlsoByNewName):
    """`mpistrat.MultiWorkerMirroredStrategy` under its former name, with its former arguments.

    ``isinstance`` is true for strategies of both names.

    Parameters
    ----------
    communication : CommunicationImplementation or str
        Family of algorithms to use.
    cluster_resolver : ClusterResolver, optional
        Resolver to compare with MPI.

    Warns
    -----
    DeprecationWarning
        Always: use `mpistrat.MultiWorkerMirroredStrategy`.

    Examples
    --------
    >>> import warnings, mpistrat
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     strategy = mpistrat.experimental.MultiWorkerMirroredStrategy("RING")
    >>> strategy.num_replicas_in_sync
    1
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: Any = None,
    ):
        warnings.warn(
            "mpistrat.experimental.MultiWorkerMirroredStrategy is deprecated: use mpistrat.MultiWorkerMirroredStrategy",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(cluster_resolver, CommunicationOptions(implementation=communication))


# `mpistrat.experimental` exports it by this name, which errors, `repr` and the reference show.
FormerMultiWorkerMirroredStrategy.__module__ = "mpistrat.experimental"
FormerMultiWorkerMirroredStrategy.__name__ = "MultiWorkerMirroredStrategy"
FormerMultiWorkerMirroredStrategy.__qualname__ = "MultiWorkerMirroredStrategy"
