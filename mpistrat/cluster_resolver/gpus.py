"""The GPUs that a process sees, and its own among them.

The GPUs are read from ``CUDA_VISIBLE_DEVICES`` and the corresponding variables of ROCm. If none of these is set,
``nvidia-smi`` counts them. CUDA itself is not called.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from mpistrat.cluster_resolver.placement import Placement, integer, with_facts
from mpistrat.launch.launchers import JSRUN

_BIND = "SLURMD_TRES_BIND"
_MASKS = re.compile(r"\bmask_gpu:((?:(?:0x)?[0-9a-fA-F]+(?:\*\d+)?(?:,|$))+)")
_IN_ORDER = re.compile(r"\b(mask|map)")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_NONE = ("NoDevFiles", "none", "void")
# Variable, pattern, and whether the number counts the tasks of a GPU rather than the GPUs of a task.
_DEALT = (
    ("SLURM_GPUS_PER_TASK", r"^(?:[^:,]*:)?(\d+)$", False),
    ("SLURM_TRES_PER_TASK", r"gres[/:]gpu(?:[:=][a-zA-Z][^:=,]*)?[:=](\d+)", False),
    ("SLURMD_TRES_BIND", r"gpu:per_task:(\d+)", False),
    ("SLURMD_TRES_BIND", r"gpu:single:(\d+)", True),
    ("SLURM_GPU_BIND", r"\bper_task:(\d+)", False),
    ("SLURM_GPU_BIND", r"\bsingle:(\d+)", True),
)


def among(
    environ: Mapping[str, str], seen: int, local_rank: int, local_size: int, on_node: int | None
) -> tuple[int, int]:
    """Return the index of this task among those that see the same GPUs, and the number of these tasks.

    The task sees ``seen`` GPUs, of ``on_node`` that the step has on this node. A task that sees fewer has them alone,
    or shares them with other tasks if they are more than its part.

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
        users = min(seen, local_size)
        return local_rank % users, users
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
    match = _MASKS.search(environ.get(_BIND, ""))
    masks: list[int] = []
    for entry in match[1].strip(",").split(",") if match else ():
        mask, _, times = entry.partition("*")
        # At most 4096: a count with a dozen digits would fill the memory, and no node has as many tasks.
        masks += [int(mask, 16)] * min(int(times or 1), 4096)
    return masks


def _sockets_in_turn(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm binds GPUs by socket and gives tasks to sockets in turn, as by default."""
    if _IN_ORDER.search(f"{environ.get('SLURM_GPU_BIND')} {environ.get(_BIND)}"):
        return False
    return environ.get("SLURM_DISTRIBUTION", "").partition(",")[0].split(":")[1:2] != ["block"]


class Visible(NamedTuple):
    """The GPUs that a variable lets a process see, as numbers or as names such as ``MIG-6f4b2d``."""

    ids: tuple[str, ...]
    variable: str


class Share(NamedTuple):
    """The visible GPUs that are for one rank: ``number`` of them, from ``first`` on."""

    first: int
    number: int


def visible(environ: Mapping[str, str]) -> Visible | None:
    """Return the GPUs that an environment lets a process see, or None if it does not restrict them."""
    for variable in _VARIABLES:
        text = environ.get(variable)
        if text is not None:
            ids: list[str] = []
            for name in map(str.strip, text.split(",")):
                # CUDA and ROCm ignore all after the first name that is not a GPU. Flux writes -1 for "no GPUs".
                if not name or name in _NONE or name.startswith("-"):
                    break
                ids.append(name)
            return Visible(tuple(ids), variable)
    return None


def count(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that a process sees: 0 without a variable and without ``nvidia-smi``.

    Raise RuntimeError if the environment does not tell the number, and ``nvidia-smi`` fails.
    """
    seen = visible(environ)
    if seen is not None:
        return len(seen.ids)
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if program is None:
        return 0
    command = [program, "--list-gpus"]
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"the GPUs of this node cannot be counted: {' '.join(command)}: {error}") from error
    if ended.returncode != 0:
        output = (ended.stderr + ended.stdout).strip()
        raise RuntimeError(
            f"the GPUs of this node cannot be counted: {' '.join(command)} ended with status {ended.returncode}: "
            f"{output}. Give gpus_per_node=0 for a job without GPUs, or set CUDA_VISIBLE_DEVICES"
        )
    return sum(line.startswith("GPU ") for line in ended.stdout.splitlines())


def on_node(environ: Mapping[str, str], local_size: int | None = None) -> tuple[int, str] | None:
    """Return the number of GPUs that a Slurm step has on this node and its source, or None if unknown.

    ``SLURM_STEP_GPUS`` is not used: it lists the GPUs of the task only.
    """
    number = integer(environ, "SLURM_GPUS_ON_NODE")
    if number is not None:
        return number, "SLURM_GPUS_ON_NODE"
    if local_size is None:
        return None
    for name, pattern, tasks_of_a_gpu in _DEALT:
        match = re.search(pattern, environ.get(name, ""))
        if match is not None and int(match[1]) > 0:
            number = int(match[1])
            return (-(-local_size // number) if tasks_of_a_gpu else number * local_size), name
    return None


def share(ids: tuple[str, ...], index: int, users: int) -> Share | None:
    """Return the part of shared GPUs that is for one rank, or None if there are no GPUs.

    ``index`` is the rank's index among the ``users`` ranks that see these GPUs.

    >>> share(("0", "1", "2", "3"), 1, 2)
    Share(first=2, number=2)
    >>> share(("0",), 1, 2)  # more ranks than GPUs: neighbours share one
    Share(first=0, number=1)
    """
    if not ids:
        return None
    per_rank = len(ids) // users
    if per_rank == 0:
        return Share(index * len(ids) // users, 1)
    return Share(index * per_rank, per_rank)


def with_gpus(placement: Placement, environ: Mapping[str, str], on_node: tuple[int, str] | None) -> Placement:
    """Return a placement with the GPUs of the rank.

    ``on_node`` is the number of GPUs that the job has on this node, and the source of that number.

    >>> rank_1 = Placement("srun", 2, 1, local_rank=1, local_size=2)
    >>> with_gpus(rank_1, {"CUDA_VISIBLE_DEVICES": "2,3"}, None).device
    'cuda:1'
    >>> with_gpus(rank_1, {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, None).device  # CUDA would show this process MIG-a
    """
    seen = visible(environ)
    if seen is None:
        return placement
    placement = with_facts(placement, seen.variable, gpus=seen.ids)
    number, how = len(seen.ids), seen.variable
    there, of_node = on_node or (None, "")
    if number > 1:
        how += f", {of_node}" if there is not None and number < there else ", the local rank"
    if number == 0:
        return with_facts(placement, how, device="cpu:0", gpus_per_rank=0)
    local_rank, local_size = (0, 1) if number == 1 else (placement.local_rank, placement.local_size)
    if local_rank is None or local_size is None or local_rank >= local_size:
        return placement
    own = share(seen.ids, *among(environ, number, local_rank, local_size, there))
    assert own is not None
    slices = any(gpu.startswith("MIG-") for gpu in seen.ids)
    placement = with_facts(placement, how, gpu=seen.ids[own.first], gpus_per_rank=1 if slices else own.number)
    if slices:
        how += "; CUDA shows a process one MIG slice, the first"
    return with_facts(placement, how, device=None if slices and own.first else f"cuda:{own.first}")
