"""The device of each rank of a strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.arrays.device import Device, any_gpu, near_cores, seen_gpus
from mpistrat.cluster_resolver.gpus import share
from mpistrat.representation import grouped, ranges
from mpistrat.runtime import affinity
from mpistrat.runtime.agreement.operation import ranks_in_words
from mpistrat.runtime.environment import rc
from mpistrat.runtime.topology import Topology

_CPU = Device("cpu")
_log = logging.getLogger(__name__)
_warned: set[str] = set()


def own_device(topology: Topology, name: str | Device | None = None, same: bool = True) -> Device:
    """Return the device of this rank. Collective, unless all ranks ask for the host.

    ``name`` is ``"cpu"``, ``"cuda"`` (also ``"gpu"``) for one of the GPUs that this rank sees, ``"cuda:1"`` for GPU 1,
    or ``"auto"``: a GPU if every rank sees one, else the host. By default it is ``mpistrat.rc.device``. ``same`` says
    whether all ranks pass the same name. Then a request for the host needs no communication. Raise RuntimeError on
    every rank if a rank lacks its device, and TypeError or ValueError if ``name`` is not the name of a device.
    """
    name = name if name is not None else rc.device
    auto = isinstance(name, str) and name.strip().lower() == "auto"
    device = _CPU if auto else Device.parse(name)
    if same and not auto and device.kind == "cpu":
        return device
    shared = auto or any_gpu(name)
    if shared:
        gpus_of_rank = _ask_all_ranks(topology, auto, lambda: seen_gpus(f"device {name}"))
        if gpus_of_rank is None:
            return _CPU
        on_nodes = [[gpus_of_rank[rank] for rank in ranks] for ranks in topology.nodes]
        _warn_of_shared_gpus(topology, on_nodes)
        node, local_rank = topology.place_of(topology.rank)
        device = Device("cuda", own_index(on_nodes[node], local_rank))
    far = _ask_all_ranks(topology, auto, lambda: _far_cores(device.require()))
    if far is None:
        return _CPU
    detours = [rank for rank, text in enumerate(far) if text]
    if detours:
        _warn(
            topology,
            f"{ranks_in_words(detours)} cannot use the cores next to the GPU (rank {detours[0]}: {far[detours[0]]}): "
            "copies between host and GPU take a longer way, by cores farther from the GPU; fix: srun "
            "--distribution=block:block, which gives neighbouring ranks neighbouring cores, or srun --gpu-bind=closest",
        )
    return device


def _far_cores(device: Device) -> str:
    """Return text about a GPU whose cores this process may not use; empty if it may, or the system does not tell."""
    near, own = near_cores(device.index) if device.kind == "cuda" else None, affinity.cores()
    if not near or not own or near & own:
        return ""
    return f"{device} is next to cores {ranges(near)}, and the rank may use {ranges(own)}"


def _ask_all_ranks(topology: Topology, auto: bool, ask: Callable[[], Any]) -> list[Any] | None:
    """Return the result of ``ask`` on each rank.

    If it raises RuntimeError on a rank, raise that on every rank, or return None with ``auto``.
    """
    answer, missing = None, ""
    try:
        answer = ask()
    except RuntimeError as error:
        missing = str(error)
    # A rank that raised at once would leave the others waiting in the first collective.
    outcomes = topology.all_gather_object((missing, answer))
    texts = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(outcomes) if problem]
    if texts and not auto:
        raise RuntimeError(texts[0])
    if texts and len(texts) < topology.size:
        _warn(topology, f"{texts[0]}; so all ranks work on the host, although others see GPUs")
    return None if texts else [result for _, result in outcomes]


def _warn_of_shared_gpus(topology: Topology, on_nodes: Sequence[Sequence[tuple[str, ...]]]) -> None:
    """Warn of ranks that share a GPU, which may be on purpose or a mistake in the job's script."""
    for ranks, seen in zip(topology.nodes, on_nodes, strict=True):
        users = grouped((seen[number][own_index(seen, number)], rank) for number, rank in enumerate(ranks))
        several = [group for group in users.values() if len(group) > 1]
        if several:
            _warn(
                topology,
                f"{ranks_in_words(several[0])} share a GPU: the node has {len(ranks)} ranks, which see "
                f"{len({gpu for ids in seen for gpu in ids})} in all; NCCL refuses shared GPUs, and their "
                "kernels take turns; fix: start one rank per GPU, unless the sharing is on purpose",
            )
            return


def _warn(topology: Topology, text: str) -> None:
    """Log a warning once in a program, on rank 0."""
    if topology.rank == 0 and text not in _warned:
        _warned.add(text)
        _log.warning("%s", text)


def own_index(seen: Sequence[tuple[str, ...]], local_rank: int) -> int:
    """Return the index of a rank's GPU among the GPUs that it sees. ``seen`` has the visible GPUs of each local rank.

    Ranks that see the same GPUs divide them in the order of ranks. A scheduler gave different GPUs to the others.
    """
    own = seen[local_rank]
    users = [rank for rank, ids in enumerate(seen) if sorted(ids) == sorted(own)]
    part = share(own, users.index(local_rank), len(users))
    assert part is not None
    order = seen[users[0]]  # other ranks may name the same GPUs in another order
    return own.index(order[part.first]) if len(set(own)) == len(own) else part.first
