"""The device of each rank of a strategy."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mpistrat.cluster_resolver.gpus import share
from mpistrat.runtime.device import Device, any_gpu, gpu_count, seen_gpus
from mpistrat.runtime.topology import Topology

VARIABLE = "MPISTRAT_DEVICE"
_CPU = Device("cpu")


def own_device(topology: Topology, name: str | Device | None = None, same: bool = True) -> Device:
    """The device of this rank. Collective, unless all ranks ask for the host.

    Parameters
    ----------
    topology : Topology
    name : str or Device, optional
        ``"cpu"``, ``"cuda"`` (also ``"gpu"``) for one of the GPUs that this rank sees, ``"cuda:1"`` for that one, or
        ``"auto"``: a GPU if every rank sees one, else the host. By default what MPISTRAT_DEVICE says, else ``"cpu"``.
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
    auto = isinstance(name, str) and name.strip().lower() == "auto"
    device = _CPU if auto else Device.parse(name)
    if same and not auto and device.kind == "cpu":
        return device
    shared = auto or any_gpu(name)
    missing = ""
    seen: tuple[str, ...] = ()
    try:
        if auto:
            seen = _seen_if_any()
        elif shared:
            seen = seen_gpus(f"device {name}")
        else:
            device.require()
    except RuntimeError as error:
        missing = str(error)
    told = topology.all_gather_object((missing, seen))
    for rank, (said, _) in enumerate(told):
        if said:
            raise RuntimeError(f"rank {rank}: {said}")
    if not shared:
        return device
    if auto and not all(each for _, each in told):
        return _CPU
    node = next(ranks for ranks in topology.nodes if topology.rank in ranks)
    return Device("cuda", own_index([told[rank][1] for rank in node], node.index(topology.rank)))


def own_index(seen: Sequence[tuple[str, ...]], local_rank: int) -> int:
    """Which of the GPUs that a rank sees is its own.

    Ranks that see the same GPUs divide them, as neighbours; a scheduler has dealt them out to the others.

    Parameters
    ----------
    seen : sequence of tuple of str
        What each rank of the node sees.
    local_rank : int
        Which of them it is.

    Examples
    --------
    >>> own_index([("a", "b")] * 2, 1)
    1
    >>> masks = [("a", "b"), ("c", "d"), ("a", "b"), ("c", "d")]
    >>> [own_index(masks, local_rank) for local_rank in range(4)]
    [0, 0, 1, 1]
    """
    own = seen[local_rank]
    users = [rank for rank, each in enumerate(seen) if sorted(each) == sorted(own)]
    part = share(own, users.index(local_rank), len(users))
    assert part is not None
    order = seen[users[0]]  # others may name the same in another order
    return own.index(order[part.first]) if len(set(own)) == len(own) else part.first


def _seen_if_any() -> tuple[str, ...]:
    try:
        gpu_count("device auto")
    except RuntimeError:
        return ()
    return seen_gpus("device auto")
