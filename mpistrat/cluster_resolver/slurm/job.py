"""The facts that Slurm gives about a whole job, which also hold for ranks that mpirun started inside it."""

from __future__ import annotations

from collections.abc import Mapping

from mpistrat.cluster_resolver.layout import Allocation
from mpistrat.cluster_resolver.slurm.step import GROUPS, NODELIST
from mpistrat.cluster_resolver.variables import integer
from mpistrat.launch.hostlist import expand_counts, expand_hostlist, parsed
from mpistrat.launch.left_over_step import groups


def job(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the job and the variables it was read from, or None outside of Slurm."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}", "SLURM_ARRAY_JOB_ID, SLURM_ARRAY_TASK_ID"
    name = next((name for name in ("SLURM_JOB_ID", "SLURM_JOBID") if environ.get(name)), None)
    return None if name is None else (environ[name], name)


def nodes_of_job(environ: Mapping[str, str]) -> tuple[tuple[str, ...], str] | None:
    """Return all nodes of the job and the variable they were read from, or None if no variable names them."""
    parts = groups(environ)
    if parts:
        return tuple(dict.fromkeys(host for part in parts for host in part)), GROUPS
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        hosts = parsed(environ, name, expand_hostlist)
        if hosts:
            return tuple(hosts), name
    return None


def allocations(environ: Mapping[str, str]) -> list[Allocation]:
    """Return the lists of nodes on which mpirun may have put ranks, the most reliable first."""
    hosts = parsed(environ, "SLURM_JOB_NODELIST", expand_hostlist)
    if not hosts:
        return []
    slots, of_slots = _slots(environ, len(hosts))
    found = []
    if environ.get("SLURM_EXTERNAL_LAUNCHER"):
        # The step runs mpiexec's proxies (MPICH, Intel MPI): its nodes are exactly those with ranks.
        step = parsed(environ, NODELIST, expand_hostlist)
        if step and set(step) <= set(hosts):
            slots_of = dict(zip(hosts, slots or (), strict=False))
            there = tuple(slots_of[host] for host in step) if slots else None
            found.append(Allocation(tuple(step), NODELIST, there, of_slots, all_used=True))
    return [*found, Allocation(tuple(hosts), "SLURM_JOB_NODELIST", slots, of_slots)]


def _slots(environ: Mapping[str, str], nodes: int) -> tuple[tuple[int, ...] | None, str]:
    """Return the number of ranks that mpirun starts on each node: the requested tasks, or by CPUs."""
    if "SLURM_STEP_ID" not in environ:  # true in a batch script; in a step it describes the daemons
        tasks = parsed(environ, "SLURM_TASKS_PER_NODE", expand_counts)
        if tasks and len(tasks) == nodes:
            return tuple(tasks), "SLURM_TASKS_PER_NODE"
    cpus = parsed(environ, "SLURM_JOB_CPUS_PER_NODE", expand_counts)
    if not cpus or len(cpus) != nodes:
        return None, ""
    each = integer(environ, "SLURM_CPUS_PER_TASK") or 1
    return tuple(count // each for count in cpus), "SLURM_JOB_CPUS_PER_NODE"
