"""The check of the GPUs that the job has on each node, and that its ranks see."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from mpistrat.cli.check.job import CheckedJob, CheckOptions, Finding, Severity
from mpistrat.runtime.agreement.operation import ranks_in_words

_ASK = (
    "ask for GPUs in the srun line too (--gpus-per-node, or --gres=gpu:N), check --gpu-bind, and do not set "
    "CUDA_VISIBLE_DEVICES by hand"
)


def local(options: CheckOptions) -> dict[str, Any]:
    from mpistrat.cluster_resolver import gpus, resolve

    seen = gpus.visible(os.environ)
    own = given = None
    with contextlib.suppress(RuntimeError, ValueError):
        placement = resolve().placement
        own = placement.gpu
        given = gpus.on_node(os.environ, placement.local_size)
    names = None if seen is None else _on_the_node(list(seen.ids), os.environ.get("SLURM_STEP_GPUS", ""))
    if seen is not None and names is not None and own in seen.ids:
        own = names[seen.ids.index(own)]
    return {
        "seen": names,
        "variable": "" if seen is None else f"{seen.variable}={os.environ[seen.variable]}",
        "own": own,
        "given": given and given[0],
        "there": _there(),
    }


def _on_the_node(seen: list[str], of_task: str) -> list[str]:
    """Return the GPUs by their numbers on the node: with cgroups each task numbers its own GPUs from 0."""
    told = of_task.split(",")
    return told if len(told) == len(seen) and all(each.isdecimal() for each in (*told, *seen)) else seen


def _there() -> int:
    """Return the number of GPUs of the driver of this node."""
    for folder, pattern in (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"), ("/sys/class/kfd/kfd", "gpu")):
        count = len(list(Path(folder).glob(pattern))) if os.path.isdir(folder) else 0
        if count:
            return count
    return 0


def judge(job: CheckedJob) -> Finding:
    facts = job.of("gpus")
    if not facts:
        return Finding("no rank reported", Severity.UNKNOWN)
    anywhere = any(each["seen"] for each in facts.values())
    for host, those in job.nodes().items():
        here = {rank: facts[rank] for rank in those if rank in facts}
        if not here:
            continue
        given = max((each["given"] or 0) for each in here.values())
        blind = [rank for rank, each in here.items() if each["seen"] is not None and not each["seen"]]
        blind += [rank for rank, each in here.items() if each["seen"] is None and given and not each["there"]]
        if blind and (given or anywhere):
            which = here[blind[0]]["variable"] or "CUDA_VISIBLE_DEVICES is not set"
            has = f"the job has {given} there" if given else "other ranks see some"
            return Finding(
                f"{host}: {ranks_in_words(blind)} {_see(blind)} no GPU ({which}), although {has}", Severity.FIX, _ASK
            )
        seen = {gpu for each in here.values() for gpu in each["seen"] or ()}
        if 0 < len(seen) < given and _numbered_anew(here):
            return Finding(
                f"{host}: each rank sees GPU {', '.join(sorted(seen))}, of {given} that the job has there: all the "
                "same GPUs, or each rank its own if cgroups number them from 0",
                Severity.UNKNOWN,
            )
        if seen and len(seen) < given:
            return Finding(
                f"{host}: its ranks see GPU {', '.join(sorted(seen))} of {given} that the job has there",
                Severity.FIX,
                "start one rank per GPU (--ntasks-per-node), or ask for fewer GPUs; " + _ASK,
            )
        slices = [rank for rank, each in here.items() if _several_slices(each["seen"])]
        if slices:
            return Finding(
                f"{host}: {ranks_in_words(slices)} {_see(slices)} several MIG slices, but CUDA uses the first only",
                Severity.FIX,
                "let the scheduler assign them (--gpus-per-task=1), or use SlurmClusterResolver(auto_set_gpu=True)",
            )
    shared = _shared(job, facts)
    if shared:
        return Finding(shared, Severity.LOOK, "start one rank per GPU: NCCL refuses two ranks on one GPU")
    if not anywhere:
        there = max(each["there"] for each in facts.values())
        if there and any(each["seen"] is not None for each in facts.values()):
            return Finding(f"no rank sees any of the {there} GPUs of its node", Severity.LOOK, _ASK)
        return Finding(f"{there} on a node, all visible" if there else "none", Severity.OK)
    return Finding(f"{len(next(iter(facts.values()))['seen'] or ())} visible to rank {next(iter(facts))}", Severity.OK)


def _see(those: list[int]) -> str:
    return "sees" if len(those) == 1 else "see"


def _numbered_anew(here: dict[int, Any]) -> bool:
    """Return whether all ranks number their GPUs from 0, so that numbers do not identify GPUs."""
    names = [each["seen"] for each in here.values()]
    return len(names) > 1 and all(each == [str(i) for i in range(len(names[0] or ()))] for each in names)


def _several_slices(seen: list[str] | None) -> bool:
    return len(seen or ()) > 1 and any(each.startswith("MIG-") for each in seen or ())


def _shared(job: CheckedJob, facts: dict[int, Any]) -> str:
    for host, those in job.nodes().items():
        users: dict[str, list[int]] = {}
        for rank in those:
            if rank in facts and facts[rank]["own"] is not None:
                users.setdefault(facts[rank]["own"], []).append(rank)
        for gpu, several in users.items():
            if len(several) > 1:
                return f"{host}: {ranks_in_words(several)} share GPU {gpu}"
    return ""
