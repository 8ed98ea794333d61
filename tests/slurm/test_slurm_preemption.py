"""What becomes of jobs with a handler that are cancelled, refused, preempted, or in a container."""

import os

import pytest
from jobs import SCRIPTS, SLOW, run_here, with_digits

pytestmark = pytest.mark.timeout(900)

RANKS = ("--nodes=1", "--ntasks=2", "--ntasks-per-node=2")
# An image that has no scontrol.
APPTAINER = """#!/bin/bash
while [ "$1" != image ]; do shift; done
shift
PATH=/nowhere exec "$@"
"""


@pytest.fixture(scope="module")
def jobs(stopping, submit_to_stop, plugin, digits, tmp_path_factory):
    """By name, jobs that were stopped in the middle, each in its own way."""
    written = tmp_path_factory.mktemp("written") / "job.sbatch"
    (written.parent / "apptainer").write_text(APPTAINER)
    (written.parent / "apptainer").chmod(0o755)
    options = ["--requeue", "--time=10", f"--mpi={plugin}", "--container=image", "--out", written]
    run_here("-m", "mpistrat", "slurm", "write", *options, "slow.py")
    path = f"{written.parent}:{os.environ['PATH']}"
    started = {}
    for name, words, script, more in (
        ("cancelled", ["--nodelist=node0"], SCRIPTS / "requeue.sbatch", {}),
        ("refused", ["--nodelist=node1", "--no-requeue"], SCRIPTS / "requeue.sbatch", {}),
        ("in a container", ["--nodelist=node2"], written, {"PATH": path, "IMAGE": "image"}),
        # All cores of the node, so that nothing else can run there.
        ("preempted", ["--partition=low", "--cpus-per-task=4"], SCRIPTS / "requeue.sbatch", {}),
    ):
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        (folder / "slow.py").write_text(SLOW)
        with_digits(folder / "out", digits)
        arguments = [*RANKS, *words, script, "slow.py", "--epochs", "20", "--dtype", "float64", "--out", "out"]
        started[name] = submit_to_stop(folder, *arguments, **more)
    for job in started.values():
        job.wait_until("its first steps", lambda job=job: job.output.count("a slow step") > 4)
    started["cancelled"].scancel()
    started["refused"].scancel("--signal=USR2")
    started["in a container"].scancel("--signal=USR2")
    wanted = ["--partition=high", "--ntasks=8", "--output=/dev/null", "--wrap=true"]
    assert stopping.run("sbatch", *wanted).returncode == 0
    yield started
    for job in started.values():
        if not job.is_over():
            job.scancel()


def test_cancelled_job_stays_away(jobs):
    job = jobs["cancelled"]
    job.ended("CANCELLED")
    assert (job.folder / "out" / "checkpoint" / "preemption.h5").exists()
    assert "put back into the queue" not in job.output
    assert job.facts()["Restarts"] == "0"


def test_refused_job_fails_and_says_why(jobs):
    job = jobs["refused"]
    output = job.ended("FAILED")
    why = f"scontrol requeue {job.number}: Requested operation is presently disabled for job {job.number}"
    assert f"the job is not put back into the queue: {why}; status 42" in output
    assert job.facts()["ExitCode"] == "42:0"
    assert (job.folder / "out" / "checkpoint" / "preemption.h5").exists()


def test_preempted_job_comes_back(jobs):
    """Slurm itself would not put it back: it ends before the time to leave (GraceTime) is over."""
    job = jobs["preempted"]
    job.wait_until("its way back into the queue", job.is_back)
    assert "was told to stop (SIGTERM at" in job.output
    assert "the job was put back into the queue" in job.output
    assert (job.folder / "out" / "checkpoint" / "preemption.h5").exists()


def test_job_in_a_container_comes_back(jobs):
    """The batch script has the scontrol that the image has not."""
    job = jobs["in a container"]
    job.wait_until("its way back into the queue", job.is_back)
    assert "there is no scontrol on PATH on this node; status 42 asks to be started again" in job.output
    assert (job.folder / "out" / "checkpoint" / "preemption.h5").exists()
