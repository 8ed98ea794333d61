"""The tasks of a node that see the same GPUs, where Slurm or jsrun shows each task a part of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mpistrat.runtime.process.launchers import JSRUN

_BIND = "SLURMD_TRES_BIND"
_MASKS = re.compile(r"\bmask_gpu:((?:(?:0x)?[0-9a-fA-F]+(?:\*\d+)?(?:,|$))+)")
_IN_ORDER = re.compile(r"\b(mask|map)")


def among(
    environ: Mapping[str, str], seen: int, local_rank: int, local_size: int, on_node: int | None
) -> tuple[int, int]:
    """Return the index of this task among those that see the same GPUs, and the number of these tasks.

    The task sees ``seen`` GPUs, of ``on_node`` that the step has on this node. A task that sees fewer has them alone,
    or shares them with other tasks if they are more than its part.

    Examples
    --------
    >>> among({}, 4, 3, 4, 4)  # all see all
    (3, 4)
    >>> among({}, 1, 3, 4, 4)  # --gpus-per-task=1
    (0, 1)
    >>> among({}, 2, 2, 4, 4)  # --gpu-bind=closest: sockets get tasks in turn; 0 and 2 share one
    (1, 2)
    >>> among({"SLURM_DISTRIBUTION": "block:block"}, 2, 2, 4, 4)  # 2 and 3 share a socket
    (0, 2)
    >>> among({"SLURMD_TRES_BIND": "gpu:mask_gpu:0x3,0xc,0xc,0x3"}, 2, 3, 4, 4)
    (1, 2)
    >>> among({"JSM_NAMESPACE_RANK": "4"}, 3, 4, 6, None)  # jsrun -a3 -g3: second task of a resource set
    (1, 3)
    """
    if environ.get(JSRUN.rank[0]):
        # Neighbours are in one resource set, but no variable tells its size: this is balanced for every size.
        each = min(seen, local_size)
        return local_rank % each, each
    if on_node is None or seen >= on_node:
        return local_rank, local_size
    masks = _masks(environ)
    if masks:
        of_rank = [masks[rank % len(masks)] for rank in range(local_size)]
        if of_rank[local_rank].bit_count() == seen:
            same = [rank for rank, mask in enumerate(of_rank) if mask == of_rank[local_rank]]
            return same.index(local_rank), len(same)
    users = max(1, round(seen * local_size / on_node))
    groups = max(1, on_node // seen)
    return (local_rank // groups if _sockets_in_turn(environ) else local_rank) % users, users


def _masks(environ: Mapping[str, str]) -> list[int]:
    """Return the masks of ``--gpu-bind=mask_gpu:0x3*2,0xc*2``, which the tasks of a node take in turn."""
    found = _MASKS.search(environ.get(_BIND, ""))
    masks: list[int] = []
    for each in found[1].strip(",").split(",") if found else ():
        mask, _, times = each.partition("*")
        masks += [int(mask, 16)] * min(int(times or 1), 4096)
    return masks


def _sockets_in_turn(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm binds GPUs by socket and gives tasks to sockets in turn, as by default."""
    if _IN_ORDER.search(f"{environ.get('SLURM_GPU_BIND')} {environ.get(_BIND)}"):
        return False
    return environ.get("SLURM_DISTRIBUTION", "").partition(",")[0].split(":")[1:2] != ["block"]
