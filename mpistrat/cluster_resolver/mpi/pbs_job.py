"""What PBS tells of a job: its nodes, in a file with one line for every rank that it expects there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mpistrat.cluster_resolver.allocation import Allocation, from_lines

JOB = "PBS_JOBID"
NODEFILE = "PBS_NODEFILE"


def job(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The name of the job, and the variable it was read from; None outside of PBS."""
    return (environ[JOB], JOB) if environ.get(JOB) else None


def allocations(environ: Mapping[str, str]) -> list[Allocation]:
    """The nodes of the job. None where the file cannot be read: some sites have it on the first node only."""
    path = environ.get(NODEFILE, "")
    if not path:
        return []
    try:
        lines = Path(path).read_text().split()
    except (OSError, ValueError):  # or is no text
        return []
    found = from_lines(lines, NODEFILE)
    return [found] if found else []
