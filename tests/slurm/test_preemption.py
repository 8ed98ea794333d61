"""What becomes of jobs with a handler that are cancelled, refused, preempted, or in a container."""

import os

import pytest
from jobs import SCRIPTS, SLOW, run_here

pytestmark = pytest.mark.timeout(240)

RANKS = ("--nodes=1", "--ntasks=2", "--ntasks-per-node=2")
# An image that has no scontrol.
APPTAINER = """#!/bin/bash
while [ "$1" != image ]; do shift; done
shift
PATH=/nowhere exec "$@"
"""


@pytest.fixture(scope="module")
def jobs(cluster, submit_in, plugin, tmp_path_factory):
    """By name, jobs that were stopped in the middle, each in its own way, and their folders."""
    written = tmp_path_factory.mktemp("written") / "job.sbatch"
    (written.parent / "apptainer").write_text(APPTAINER)
    (written.parent / "apptainer").chmod(0o755)
    options = ["--requeue", "--time=10", f"--mpi={plugin}", "--container=image", "--out", written]
    run_here("-m", "mpistrat", "slurm", "write", *options, "slow.py")
    path = f"{written.parent}:{os.environ['PATH']}"
    started = {}
    for name, words, script, environ in (
        ("cancelled", ["--nodelist=node1"], SCRIPTS / "requeue.sbatch", {}),
        ("refused", ["--nodelist=node1", "--no-requeue"], SCRIPTS / "requeue.sbatch", {}),
        # All cores of the node, so that nothing else can run there.
        (
            "preempted",
            ["--partition=low", "--nodelist=node0", "--cpus-per-task=4"],
            SCRIPTS / "requeue.sbatch",
            {},
        ),
        ("in a container", ["--nodelist=node2"], written, {"PATH": path, "IMAGE": "image"}),
    ):
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        (folder / "slow.py").write_text(SLOW)
        arguments = ["slow.py", "--epochs", "20", "--dtype", "float64", "--out", "out"]
        started[name] = submit_in(folder, *RANKS, *words, script, *arguments, **environ), folder
    for job, _ in started.values():
        job.wait_until("its first steps", lambda job=job: job.output.count("a slow step") > 4, 30)
    job_of = {name: job for name, (job, _) in started.items()}
    job_of["cancelled"].scancel()
    job_of["refused"].scancel("--signal=USR2")
    job_of["in a container"].scancel("--signal=USR2")
    wanted = ["--partition=high", "--nodelist=node0", "--ntasks=8", "--output=/dev/null", "--wrap=true"]
    assert cluster.run("sbatch", *wanted).returncode == 0
    yield started
    for job in job_of.values():
        if not job.is_over():
            job.scancel()


def facts(cluster, job):
    """What Slurm tells of a job, by name."""
    said = cluster.run("scontrol", "show", "job", "--oneliner", job.number).stdout
    return dict(word.partition("=")[::2] for word in said.split())


def wait_in_queue(cluster, job):
    job.wait_until("its way back into the queue", lambda: set(job.states()) == {"PENDING"}, 60)
    assert facts(cluster, job)["Restarts"] == "1"


def test_cancelled_job_stays_away(cluster, jobs):
    job, folder = jobs["cancelled"]
    job.ended("CANCELLED", 60)
    assert (folder / "out" / "checkpoint" / "preemption.h5").exists()
    assert "put back into the queue" not in job.output
    assert facts(cluster, job)["Restarts"] == "0"


def test_refused_job_fails_and_says_why(cluster, jobs):
    job, folder = jobs["refused"]
    output = job.ended("FAILED", 60)
    why = f"scontrol requeue {job.number}: Requested operation is presently disabled for job {job.number}"
    assert f"the job is not put back into the queue: {why}; status 42" in output
    assert facts(cluster, job)["ExitCode"] == "42:0"
    assert (folder / "out" / "checkpoint" / "preemption.h5").exists()


def test_preempted_job_comes_back(cluster, jobs):
    """Slurm itself would not put it back: it ends before the time to leave (GraceTime) is over."""
    job, folder = jobs["preempted"]
    wait_in_queue(cluster, job)
    assert "was told to stop (SIGTERM at" in job.output
    assert "the job was put back into the queue" in job.output
    assert (folder / "out" / "checkpoint" / "preemption.h5").exists()


def test_job_in_a_container_comes_back(cluster, jobs):
    """The batch script has the scontrol that the image has not."""
    job, folder = jobs["in a container"]
    wait_in_queue(cluster, job)
    assert "there is no scontrol on PATH on this node; status 42 asks to be started again" in job.output
    assert (folder / "out" / "checkpoint" / "preemption.h5").exists()
