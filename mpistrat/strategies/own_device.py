"""The device of each rank of a strategy."""

from __future__ import annotations

import os

from mpistrat.runtime.device import Device
from mpistrat.runtime.topology import Topology

VARIABLE = "MPISTRAT_DEVICE"


def own_device(topology: Topology, name: str | Device | None, same: bool = True) -> Device:
    """The device of this rank. Collective, unless all ranks ask for the host.

    Parameters
    ----------
    topology : Topology
    name : str or Device, optional
        As in `Device.own`; by default what MPISTRAT_DEVICE says, else ``"cpu"``. With ``"auto"`` all ranks are on the
        host if one of them has no GPU.
    same : bool
        Whether all ranks ask for the same, so that it is known here whether it is the host for all.

    Raises
    ------
    RuntimeError
        On every rank, if one of them lacks its device.
    TypeError, ValueError
        If it is no name of a device.
    """
    name = name if name is not None else os.environ.get(VARIABLE) or "cpu"
    auto = isinstance(name, str) and name.lower() == "auto"
    if same and not auto and Device.parse(name).kind == "cpu":
        return Device.parse(name)
    node, device, missing = topology.nodes[_node(topology)], None, None
    try:
        device = Device.own(name, node.index(topology.rank), len(node))
    except RuntimeError as error:
        missing = str(error)
    told = topology.all_gather_object((missing, None if device is None else device.kind))
    for rank, (said, _) in enumerate(told):
        if said is not None:
            raise RuntimeError(f"rank {rank}: {said}")
    assert device is not None
    return device if not auto or all(kind == "cuda" for _, kind in told) else Device("cpu")


def _node(topology: Topology) -> int:
    return next(i for i, ranks in enumerate(topology.nodes) if topology.rank in ranks)
