"""The check of the cores of each rank, and of the threads that its libraries start."""

from __future__ import annotations

import os
from typing import Any

from mpistrat.cli.check.checks.finding import CheckedJob, CheckOptions, Finding, Severity
from mpistrat.process.ranges import ranges
from mpistrat.runtime import affinity


def local(options: CheckOptions) -> dict[str, Any] | None:
    own = affinity.cores()
    if own is None:
        return None
    started = affinity.threads(os.environ)
    return {
        "cores": sorted(own),
        "there": affinity.cores_of_machine(),
        "threads": None if started is None else started[0],
    }


def judge(job: CheckedJob) -> Finding:
    facts = job.of("binding")
    if not facts:
        return Finding("this system does not show the cores of a process", Severity.UNKNOWN)
    crowded = ""
    for host, those in job.nodes().items():
        here = [facts[rank] for rank in those if rank in facts]
        if not here:
            continue
        masks = [frozenset(each["cores"]) for each in here]
        union = frozenset[int]().union(*masks)
        there = max(each["there"] for each in here)
        if affinity.share_one_core(masks, there):
            return Finding(
                f"{host}: all {len(here)} ranks share core {ranges(union)} of {there}", Severity.FIX, affinity.advice()
            )
        threads = sum(each["threads"] or len(each["cores"]) for each in here)
        if len(here) > len(union) and not crowded:
            crowded = f"{host}: {len(here)} ranks on {len(union)} of {there} cores"
        elif threads > len(union) and len(here) > 1 and not crowded:
            crowded = f"{host}: {len(here)} ranks start up to {threads} threads on {len(union)} cores"
    if crowded:
        return Finding(
            crowded, Severity.LOOK, "set OMP_NUM_THREADS to the cores per rank, and do not start more ranks than cores"
        )
    first = next(iter(facts.values()))
    return Finding(
        f"{len(first['cores'])} core{'s' * (len(first['cores']) > 1)} for rank {next(iter(facts))}, "
        f"threads: {first['threads'] or 'one per core'}",
        Severity.OK,
    )
