"""The facts that PBS gives about a job: its nodes, in a file with one line for each expected rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mpistrat.cluster_resolver.layout import Allocation, from_lines

JOB = "PBS_JOBID"
NODEFILE = "PBS_NODEFILE"


def job(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the job and the variable it was read from, or None outside of PBS."""
    return (environ[JOB], JOB) if environ.get(JOB) else None


def allocations(environ: Mapping[str, str]) -> list[Allocation]:
    """Return the nodes of the job, or an empty list if the file cannot be read.

    Some sites have the file on the first node only.
    """
    path = environ.get(NODEFILE, "")
    if not path:
        return []
    try:
        lines = Path(path).read_text().split()
    except (OSError, ValueError):  # not on this node, or not text
        return []
    found = from_lines(lines, NODEFILE)
    return [found] if found else []
