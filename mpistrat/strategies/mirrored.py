"""The strategy for the ranks of one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat.cluster_resolver.own_device import own_device
from mpistrat.collectives import CrossDeviceOps
from mpistrat.replicas import ReplicaGroup
from mpistrat.strategies.dealing import parsed_devices, replicas_of, require_hosts, require_one_for_each, topology_of
from mpistrat.strategy import Strategy, StrategyExtended


class MirroredStrategy(Strategy):
    """Synchronous data parallelism over the ranks of one node, with mirrored variables.

    Parameters
    ----------
    devices : sequence of str, optional
        Device of each replica, in the order of ranks. With more names than ranks, they are dealt to the ranks in
        blocks: a rank plays several replicas, each with a name for the host. By default ``mpistrat.rc.device``
        (MPISTRAT_DEVICE): ``cpu``, ``cuda`` for a GPU per rank, or ``auto`` for a GPU if every rank sees one, else the
        host.
    cross_device_ops : CrossDeviceOps, optional
        Cross-device ops; by default the fastest algorithm for each message.
    comm : mpi4py.MPI.Intracomm, optional
        Communicator of the ranks to use; by default all ranks.
    virtual_replicas : int, optional
        As in `MultiWorkerMirroredStrategy`, in place of ``devices``.

    Raises
    ------
    RuntimeError
        If the ranks are on several nodes, or a device does not exist.
    ValueError
        If there are fewer devices than ranks, a rank plays several replicas on GPUs or with ``cross_device_ops``, or
        both ``devices`` and ``virtual_replicas`` are given. As `MultiWorkerMirroredStrategy`.
    TypeError
        If ``cross_device_ops`` is not a ``CrossDeviceOps``, ``devices`` is a string, or ``virtual_replicas`` is not an
        int.

    Examples
    --------
    >>> strategy = MirroredStrategy()
    >>> strategy.num_replicas_in_sync
    1
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        comm: Any = None,
        virtual_replicas: int | None = None,
    ):
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise TypeError(f"cross_device_ops must be a CrossDeviceOps object, not {cross_device_ops!r}")
        parsed = parsed_devices("devices", devices)
        if devices is not None and virtual_replicas is not None:
            raise ValueError("give either devices or virtual_replicas: a name in devices is a replica")
        topology = topology_of(comm)
        if len(topology.nodes) > 1:
            raise RuntimeError(
                f"MirroredStrategy works on the ranks of one node, but its ranks are on "
                f"{len(topology.nodes)} nodes: use MultiWorkerMirroredStrategy, or give a comm of one node's ranks"
            )
        replicas = replicas_of(topology, virtual_replicas)
        if parsed is not None and len(parsed) != replicas.size:
            if len(parsed) < replicas.size:
                require_one_for_each("devices", parsed, replicas)
            # More names than ranks: each name is a replica, and a rank plays several.
            replicas = ReplicaGroup.dealt(topology, len(parsed), is_virtual=False)
            require_hosts(replicas, parsed)
        device = own_device(
            topology, None if parsed is None else parsed[replicas.first], same=len({*(parsed or ())}) <= 1
        )
        require_hosts(replicas, [device])
        if cross_device_ops is not None and not replicas.by_rank:
            raise ValueError(
                f"cross_device_ops combine one value of each rank, and {replicas.size} replicas share fewer ranks: "
                "leave them out"
            )
        super().__init__(StrategyExtended(self, topology, device, cross_device_ops, replicas=replicas))
        if parsed is not None:
            self.extended.engine.devices = tuple(str(parsed[replica]) for replica in replicas.local)
