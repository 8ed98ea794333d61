"""What becomes of jobs with a handler that are cancelled, refused, preempted, or in a container."""

import os

import cluster as clusters
import pytest
from jobs import SCRIPTS, SLOW, run_here, submitted, with_digits

pytestmark = pytest.mark.timeout(240)

RANKS = ("--nodes=1", "--ntasks=2", "--ntasks-per-node=2")
# An image that has no scontrol.
APPTAINER = """#!/bin/bash
while [ "$1" != image ]; do shift; done
shift
PATH=/nowhere exec "$@"
"""


@pytest.fixture(scope="module")
def preempting():
    """Another Slurm, where a job has to make room for another one."""
    with clusters.Cluster(1, clusters.PREEMPTION) as started:
        yield started


@pytest.fixture(scope="module")
def jobs(cluster, preempting, environ, plugin, digits, tmp_path_factory):
    """By name, jobs that were stopped in the middle, each in its own way, and their folders."""
    written = tmp_path_factory.mktemp("written") / "job.sbatch"
    (written.parent / "apptainer").write_text(APPTAINER)
    (written.parent / "apptainer").chmod(0o755)
    options = ["--requeue", "--time=10", f"--mpi={plugin}", "--container=image", "--out", written]
    run_here("-m", "mpistrat", "slurm", "write", *options, "slow.py")
    path = f"{written.parent}:{os.environ['PATH']}"
    started = {}
    for name, place, words, script, more in (
        ("cancelled", cluster, [], SCRIPTS / "requeue.sbatch", {}),
        ("refused", cluster, ["--no-requeue"], SCRIPTS / "requeue.sbatch", {}),
        ("in a container", cluster, [], written, {"PATH": path, "IMAGE": "image"}),
        # All cores of the node, so that nothing else can run there.
        ("preempted", preempting, ["--partition=low", "--cpus-per-task=4"], SCRIPTS / "requeue.sbatch", {}),
    ):
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        (folder / "slow.py").write_text(SLOW)
        with_digits(folder / "out", digits)
        arguments = [
            *RANKS,
            *words,
            script,
            "slow.py",
            "--epochs",
            "20",
            "--dtype",
            "float64",
            "--out",
            "out",
        ]
        started[name] = submitted(place, folder, *arguments, **{**environ, **more}), folder
    for job, _ in started.values():
        job.wait_until("its first steps", lambda job=job: job.output.count("a slow step") > 4)
    job_of = {name: job for name, (job, _) in started.items()}
    job_of["cancelled"].scancel()
    job_of["refused"].scancel("--signal=USR2")
    job_of["in a container"].scancel("--signal=USR2")
    wanted = ["--partition=high", "--ntasks=8", "--output=/dev/null", "--wrap=true"]
    assert preempting.run("sbatch", *wanted).returncode == 0
    yield started
    for job in job_of.values():
        if not job.is_over():
            job.scancel()


def facts(job):
    """What Slurm tells of a job, by name."""
    said = job.cluster.run("scontrol", "show", "job", "--oneliner", job.number).stdout
    return dict(word.partition("=")[::2] for word in said.split())


def wait_in_queue(job):
    job.wait_until("its way back into the queue", lambda: set(job.states()) == {"PENDING"}, 60)
    assert facts(job)["Restarts"] == "1"


def test_cancelled_job_stays_away(jobs):
    job, folder = jobs["cancelled"]
    job.ended("CANCELLED", 60)
    assert (folder / "out" / "checkpoint" / "preemption.h5").exists()
    assert "put back into the queue" not in job.output
    assert facts(job)["Restarts"] == "0"


def test_refused_job_fails_and_says_why(jobs):
    job, folder = jobs["refused"]
    output = job.ended("FAILED", 60)
    why = f"scontrol requeue {job.number}: Requested operation is presently disabled for job {job.number}"
    assert f"the job is not put back into the queue: {why}; status 42" in output
    assert facts(job)["ExitCode"] == "42:0"
    assert (folder / "out" / "checkpoint" / "preemption.h5").exists()


def test_preempted_job_comes_back(jobs):
    """Slurm itself would not put it back: it ends before the time to leave (GraceTime) is over."""
    job, folder = jobs["preempted"]
    wait_in_queue(job)
    assert "was told to stop (SIGTERM at" in job.output
    assert "the job was put back into the queue" in job.output
    assert (folder / "out" / "checkpoint" / "preemption.h5").exists()


def test_job_in_a_container_comes_back(jobs):
    """The batch script has the scontrol that the image has not."""
    job, folder = jobs["in a container"]
    wait_in_queue(job)
    assert "there is no scontrol on PATH on this node; status 42 asks to be started again" in job.output
    assert (folder / "out" / "checkpoint" / "preemption.h5").exists()
