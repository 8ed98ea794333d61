"""The replicas of a strategy: one for each rank, or as many as the program asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays.device import Device
from mpistrat.collectives import structures
from mpistrat.collectives.algorithms.choose import Choice
from mpistrat.process import mpi
from mpistrat.replicas import ReplicaGroup
from mpistrat.runtime import affinity
from mpistrat.runtime.topology import Topology

_NAME = "virtual_replicas"


def parsed_devices(name: str, devices: Sequence[str] | None) -> list[Device] | None:
    """Return the argument ``name``, a name for each replica. Raise TypeError for a string, and as `Device.parse`."""
    if isinstance(devices, str):
        raise TypeError(f"{name} must be a list with a name for each replica, not the string {devices!r}")
    return None if devices is None else [Device.parse(device) for device in devices]


def require_one_for_each(name: str, devices: Sequence[Device], replicas: ReplicaGroup) -> None:
    """Raise ValueError unless there are as many devices as replicas."""
    if len(devices) != replicas.size:
        raise ValueError(
            f"{name} names {len(devices)} devices for {replicas.size} replicas: name one for each, in rank order"
        )


def topology_of(comm: Any) -> Topology:
    """Return the ranks of a communicator, by default all, where algorithms are chosen as measured. Collective."""
    topology = Topology.of(mpi.start().COMM_WORLD if comm is None else comm)
    Choice.of(topology).load_measured_costs(topology)
    return topology


def replicas_of(topology: Topology, virtual_replicas: Any) -> ReplicaGroup:
    """Return one replica for each rank, or ``virtual_replicas`` dealt to them. Collective if that is given.

    Raise TypeError if it is not an int, ValueError if it is too small, and on every rank if it differs between ranks.
    """
    if virtual_replicas is None:
        return ReplicaGroup(topology)
    with structures.refusals(_NAME, topology):
        if isinstance(virtual_replicas, bool) or not isinstance(virtual_replicas, (int, np.integer)):
            raise TypeError(f"virtual_replicas must be an int, not {virtual_replicas!r}")
        if virtual_replicas < 1:
            raise ValueError(f"virtual_replicas must be at least 1, not {virtual_replicas}")
        replicas = ReplicaGroup.dealt(topology, int(virtual_replicas))
    structures.agree(topology, _NAME, replicas.size)
    # Equal bits on other ranks need the same BLAS there.
    affinity.warn_if_blas_differs(topology)
    return replicas


def require_hosts(replicas: ReplicaGroup, devices: Sequence[Device]) -> None:
    """Raise a ValueError if replicas of one rank are to share GPUs."""
    if not replicas.by_rank and any(device.kind != "cpu" for device in devices):
        raise ValueError(
            f"{replicas.size} replicas share fewer ranks, and replicas of one rank cannot share GPUs: start a rank for "
            "each replica, or use device='cpu'"
        )
