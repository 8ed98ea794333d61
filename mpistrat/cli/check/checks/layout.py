"""The check that the environment and MPI put the same ranks on each node."""

from __future__ import annotations

from typing import Any

from mpistrat.cli.check.checks.finding import CheckedJob, CheckOptions, Finding, Severity
from mpistrat.cli.check.checks.talk import Talk


def talk(talk: Talk, options: CheckOptions) -> Any:
    """Return the first rank where environment and MPI contradict each other, with text and cause, or None."""
    from mpistrat.cluster_resolver import resolve
    from mpistrat.cluster_resolver.compare import differences, told_by
    from mpistrat.cluster_resolver.mpi.resolver import placement_in

    try:
        said = differences(told_by(resolve()), placement_in(talk.topology))
    except (RuntimeError, ValueError) as error:
        said = f"the environment cannot be read: {error}", "mpistrat hosts shows what is read"
    told = talk.collect(said)
    if told is None:
        return None
    return next(([rank, *each] for rank, each in enumerate(told) if each is not None), None)


def judge(job: CheckedJob) -> Finding:
    nodes = job.nodes()
    counts = [len(those) for those in nodes.values()]
    each = f"{counts[0]} each" if len(set(counts)) == 1 else ", ".join(map(str, counts[:16]))
    text = f"{len(nodes)} node{'s' * (len(nodes) > 1)}, ranks: {each}"
    if job.talked.get("layout"):
        rank, what, cause = job.talked["layout"]
        return Finding(f"{text}\nrank {rank}: {what}", Severity.FIX, cause)
    if "layout" not in job.talked:
        return Finding(text, Severity.UNKNOWN)
    return Finding(text, Severity.OK)
