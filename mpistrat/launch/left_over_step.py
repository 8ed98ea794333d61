"""A check whether Slurm's step variables describe the step of this process.

``sbatch`` passes its whole environment to the batch script. Called inside a step (such as one of ``srun --pty
bash``), it passes on that step's variables, although the script does not run in that step.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpistrat.launch.hostlist import expand_counts, expand_hostlist, parsed
from mpistrat.launch.launchers import SRUN

_GROUP = ("PACK_GROUP", "HET_GROUP")  # sbatch sets both; srun without sbatch sets the first only
(_SIZE,), (_RANK,), (_NODE,) = SRUN.size, SRUN.rank, SRUN.node
_COUNTS, _NODELIST = "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"
_JOB_NODELIST = "SLURM_JOB_NODELIST"
_GTIDS = "SLURM_GTIDS"
_MOST_GROUPS = 18  # digits of their number


def left_over(environ: Mapping[str, str]) -> str | None:
    """Return the evidence that the variables of the step are another job's, or None without evidence.

    A step of one task per node on the same nodes cannot be told apart from the batch script's own step. Raise
    ValueError if a list of nodes or counts cannot be read. The message names the variable.
    """
    parts = groups(environ)
    nodes, of_job = (parsed(environ, name, expand_hostlist) for name in (_NODELIST, _JOB_NODELIST))
    if nodes and of_job and not set(nodes) <= set(of_job).union(*parts):
        return f"{_NODELIST}={environ[_NODELIST]} is not part of {_JOB_NODELIST}={environ[_JOB_NODELIST]}"
    # A batch script is task 0, alone.
    tasks = environ.get(_GTIDS, "")
    several = environ.get(_RANK, "0") != "0" or "," in tasks
    of_this_job = environ.get("PMIX_NAMESPACE", "").startswith(f"slurm.pmix.{environ.get('SLURM_JOB_ID')}.")
    # In heterogeneous jobs the counts may belong to another component than the step.
    if parts or several or of_this_job or environ.get(_SIZE) == "1":
        return None
    counts = parsed(environ, _COUNTS, expand_counts)
    if counts and counts[0] > 1 and tasks == "0" and environ.get(_NODE, "0") == "0":
        return f"{_COUNTS}={environ[_COUNTS]} but {_GTIDS}={tasks}"
    # `srun --preserve-env` and the shell of salloc keep the job's counts.
    both = ((_SIZE, "SLURM_NTASKS"), (_COUNTS, "SLURM_TASKS_PER_NODE"))
    if all(environ.get(own) and environ.get(job) and environ[own] != environ[job] for own, job in both):
        return ", ".join(f"{own}={environ[own]} but {job}={environ[job]}" for own, job in both)
    return None


def groups(environ: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the nodes of each group of a heterogeneous job, or an empty list for other jobs.

    A job that was submitted inside a heterogeneous job inherits its variables. It is an "other job" too. Raise
    ValueError if a list of nodes cannot be read. The message names the variable.
    """
    text = environ.get("SLURM_HET_SIZE", "")
    size = int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_GROUPS else 0
    numbers = range(min(size, len(environ)))  # each group has variables
    of_jobs = {environ.get(f"SLURM_JOB_ID_{kind}_{number}") for kind in _GROUP for number in numbers} - {None}
    if of_jobs and environ.get("SLURM_JOB_ID") not in of_jobs:
        return []
    found = []
    for number in numbers:
        names = (f"SLURM_JOB_NODELIST_{kind}_{number}" for kind in _GROUP)
        hosts = next(filter(None, (parsed(environ, name, expand_hostlist) for name in names)), None)
        if hosts:
            found.append(tuple(hosts))
    return found
