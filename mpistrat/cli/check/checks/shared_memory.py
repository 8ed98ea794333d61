"""The check of free space in /dev/shm, which the ranks of a node use for communication."""

from __future__ import annotations

import os
from typing import Any

from mpistrat.cli.check.checks.finding import CheckedJob, CheckOptions, Finding, Severity, size

PATH = "/dev/shm"
_LEAST = 128 * 2**20
_PER_RANK = 32 * 2**20


def local(options: CheckOptions) -> dict[str, Any] | None:
    try:
        status = os.statvfs(PATH)
    except OSError:
        return None
    return {"free": status.f_bavail * status.f_frsize, "total": status.f_blocks * status.f_frsize}


def judge(job: CheckedJob) -> Finding:
    facts = job.of("shared_memory")
    if not facts:
        return Finding("there is no /dev/shm", Severity.UNKNOWN)
    worst: tuple[float, str, int, Any] | None = None
    for host, those in job.nodes().items():
        here = [facts[rank] for rank in those if rank in facts]
        if here:
            wanted = max(_LEAST, _PER_RANK * len(those))
            least = min(here, key=lambda each: each["free"])
            if worst is None or least["free"] / wanted < worst[0]:
                worst = (least["free"] / wanted, host, wanted, least)
    assert worst is not None
    ratio, host, wanted, least = worst
    text = f"{host}: {size(least['free'])} free of {size(least['total'])}"
    if ratio >= 1:
        return Finding(text, Severity.OK)
    why = (
        "give the container more space (docker --shm-size=8g, or --ipc=host)"
        if least["total"] < wanted
        else "remove files that killed jobs left there"
    )
    return Finding(f"{text}; its ranks need {size(wanted)}", Severity.FIX, why)
