"""Batch scripts that were submitted inside a step of another job: one answer in all places that ask."""

import pytest

from mpistrat.cluster_resolver import MpiClusterResolver, SlurmClusterResolver, resolve
from mpistrat.launch.launch import StartedTasks, started_tasks
from mpistrat.launch.slurm import left_over

# What Slurm gives the batch script of a job, and what is left of the step that sbatch was called in.
OWN = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "SLURM_GTIDS": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}


def script(step, job):
    """Of (number of tasks, counts, nodes) of the step and of the job."""
    names = ("NUM_TASKS", "TASKS_PER_NODE", "NODELIST")
    of_step = {f"SLURM_STEP_{name}": text for name, text in zip(names, step, strict=True)}
    of_job = dict(zip(("SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_JOB_NODELIST"), job, strict=True))
    return {**OWN, **of_step, **of_job}


LEFT_OVER = {
    "of equal size on other nodes": script(("2", "1(x2)", "n[0-1]"), ("2", "1(x2)", "n[2-3]")),
    "of equal size on the same nodes": script(("4", "2(x2)", "n[0-1]"), ("4", "2(x2)", "n[0-1]")),
    "of equal size on one node": script(("4", "4", "n0"), ("4", "4", "n0")),
    "of another size on the same nodes": script(("4", "4", "n0"), ("1", "1", "n0")),
    "of another size, one task a node": script(("2", "1(x2)", "n[0-1]"), ("4", "2(x2)", "n[0-1]")),
    "of a heterogeneous job": {
        **script(("2", "1(x2)", "n[0-1]"), ("2", "1(x2)", "n[2-3]")),
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_ID_HET_GROUP_0": "7",
        "SLURM_JOB_ID_HET_GROUP_1": "8",
    },
}
ITS_OWN = {
    "one task a node": script(("2", "1(x2)", "n[0-1]"), ("2", "1(x2)", "n[0-1]")),
    "several a node": {**script(("4", "2(x2)", "n[0-1]"), ("4", "2(x2)", "n[0-1]")), "SLURM_GTIDS": "0,1"},
    "part of the job": script(("2", "1(x2)", "n[1-2]"), ("2", "1(x2)", "n[0-2]")),
}


@pytest.mark.parametrize("case", LEFT_OVER)
def test_step_of_another_job(case):
    environ = LEFT_OVER[case]
    assert left_over(environ) is not None
    assert started_tasks(environ) is None
    resolver = resolve(environ)
    assert isinstance(resolver, MpiClusterResolver)
    assert resolver.placement.size == 1
    with pytest.raises(RuntimeError, match="those of another job"):
        SlurmClusterResolver(environ=dict(environ))


@pytest.mark.parametrize("case", ITS_OWN)
def test_step_of_this_job(case):
    environ = ITS_OWN[case]
    size = int(environ["SLURM_STEP_NUM_TASKS"])
    assert left_over(environ) is None
    assert started_tasks(environ) == StartedTasks(size, "SLURM_STEP_NUM_TASKS")
    assert isinstance(resolve(environ), SlurmClusterResolver)
    assert SlurmClusterResolver(environ=dict(environ)).placement.size == size


def test_unreadable_variables_do_not_stop_what_needs_none():
    environ = {**ITS_OWN["one task a node"], "SLURM_STEP_NODELIST": "n[0-"}
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST cannot be read"):
        left_over(environ)
    assert started_tasks(environ) == StartedTasks(2, "SLURM_STEP_NUM_TASKS")
