"""Jobs that go on after the loss of a rank or of a node, and compute what one rank would have."""

import cluster as clusters
import pytest
from jobs import SCRIPTS, Job, run_here, submitted, unstuck

pytestmark = pytest.mark.timeout(900)

STEPS = 80
PROGRAM = """
import hashlib, os, sys, time
import numpy as np
import mpistrat
from mpistrat.data import Dataset
strategy = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=4)
rank = strategy.comm.rank
with strategy.scope():
    weights = mpistrat.Variable(np.zeros(3), name="weights")
    optimizer = mpistrat.optimizers.Adam(0.1)
x = np.random.default_rng(0).normal(size=(60, 3))
rows = Dataset.from_arrays((x, x @ [1.0, 2.0, 3.0])).shuffle(60, seed=1).batch(8)
loop = mpistrat.experimental.ElasticLoop(
    rows, epochs=10, directory="checkpoints", copy_share=1, weights=weights, optimizer=optimizer, rng=strategy.rng(7)
)
if rank == 0:
    print(f"starts with step {loop.step} on {strategy.comm.size} ranks", flush=True)
def step(x, y, rng):
    noise = rng.normal(size=len(y))
    if len(y):
        optimizer.apply_gradients([(x.T @ (x @ weights.value() - y + noise) / 8, weights)])
    else:
        optimizer.apply_gradients([(np.zeros(3), weights)])
ends = {"killed": lambda: os.kill(os.getpid(), 9), "fails": lambda: 1 / 0, "leaves": lambda: os._exit(7)}
for batch in loop:
    strategy.run(step, args=(*batch, loop.rng))
    if "slow" in sys.argv and loop.restarts == 0:
        time.sleep(0.5)
    if loop.step == 5 and rank == 0:
        print("five steps", flush=True)
    if loop.step == 15 and rank == 0:
        print("fifteen steps", flush=True)
    if loop.step == 17 and loop.restarts == 0 and rank == 1 and sys.argv[1] in ends:
        ends[sys.argv[1]]()
if rank == 0:
    print("result", loop.step, hashlib.sha256(weights.numpy().tobytes()).hexdigest(), flush=True)
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What one rank prints that nothing happens to."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "program.py").write_text(PROGRAM.replace('"checkpoints"', repr(str(folder / "checkpoints"))))
    (line,) = (line for line in run_here(folder / "program.py", "alone").splitlines() if line.startswith("result "))
    return line


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return "program.py"


def starts(output):
    """At which step, and on how many ranks, each run of the job started."""
    found = [line.split() for line in output.splitlines() if line.startswith("starts with step ")]
    return [(int(words[3]), int(words[5])) for words in found]


@pytest.mark.mpich
def test_lost_rank(run_job, program, result):
    output = run_job("--nodes=2", "--ntasks-per-node=2", SCRIPTS / "elastic.sbatch", program, "killed")
    (first, *others), ranks = zip(*starts(output), strict=True)
    assert first == 0
    assert others[-1] in (16, 17)
    assert {*ranks} == {4}
    assert result in output


@pytest.mark.parametrize(("how", "status"), [("fails", 1), ("leaves", 7)])
def test_an_error_ends_the_job(submit, program, how, status):
    words = "--nodes=2", "--ntasks-per-node=1", SCRIPTS / "elastic.sbatch", program, how
    job = unstuck(lambda: submit(*words), "its end", Job.is_over)
    output = job.ended("FAILED")
    assert len(starts(output)) == 1
    assert "goes on" not in output
    assert job.facts()["ExitCode"] == f"{status}:0"


def test_lost_node(can_run, environ, program, result, tmp_path):
    """As by a loss of power: connections stay open, so that the other ranks wait until the watchdog ends them."""
    words = "slurm write --nodes 2 --ntasks-per-node 2 --elastic fewer --mpi pmix program.py"
    (tmp_path / "elastic.sbatch").write_text(run_here("-m", "mpistrat", *words.split(), cwd=tmp_path))
    patience = {"MPISTRAT_HANG_ABORT_SECONDS": "10"}
    with clusters.Cluster(2) as cluster:
        job = submitted(cluster, tmp_path, tmp_path / "elastic.sbatch", program, "lost", "slow", **environ, **patience)
        job.wait_until("its first steps", lambda: "five steps" in job.output)
        cluster.lose(1)
        # Slurm itself waits longer for the node: the job is COMPLETING.
        job.wait_until("its end", lambda: "result " in job.output or job.is_over())
        output = job.output
    (first, second), ranks = zip(*starts(output), strict=True)
    assert first == 0
    assert 4 <= second < STEPS
    assert "a loss (status 137)" in output  # the script ends the step, which waits for the node
    assert ranks == (4, 2)
    assert result in output


def test_links_that_break_and_come_back(can_run, environ, program, result, tmp_path):
    """A short break delays the job. After a long one it goes on without the node, whose ranks come back too late."""
    words = "slurm write --nodes 2 --ntasks-per-node 2 --spare 1 --elastic same --mpi pmix program.py"
    (tmp_path / "elastic.sbatch").write_text(run_here("-m", "mpistrat", *words.split(), cwd=tmp_path))
    patience = {"MPISTRAT_HANG_ABORT_SECONDS": "10"}
    with clusters.Cluster(3) as cluster:
        job = submitted(cluster, tmp_path, tmp_path / "elastic.sbatch", program, "cut", "slow", **environ, **patience)
        job.wait_until("its first steps", lambda: "five steps" in job.output)
        for _ in range(20):
            cluster.cut(1)
            cluster.heal(1)
        job.wait_until("its next steps", lambda: "fifteen steps" in job.output)
        assert len(starts(job.output)) == 1
        cluster.cut(1)
        job.wait_until("its new start", lambda: len(starts(job.output)) == 2)
        cluster.heal(1)
        job.wait_until("its end", lambda: "result " in job.output or job.is_over())
        output = job.output
    assert {ranks for _, ranks in starts(output)} == {4}
    assert result in output


def test_lost_batch_host(can_run, environ, program, result, tmp_path):
    """Slurm keeps such a job, in which no script runs any more: another node puts it back into the queue.

    Two spare nodes, since Slurm may also drain the node where the step of the lost one is slow to end.
    """
    environ = {**environ, "MPISTRAT_HANG_ABORT_SECONDS": "10"}
    with clusters.Cluster(5, "SlurmdTimeout=20\n") as cluster:
        options = "--exclude=node0", "--nodes=2", "--ntasks-per-node=2"
        job = submitted(cluster, tmp_path, *options, SCRIPTS / "elastic.sbatch", program, "lost", "slow", **environ)
        job.wait_until("its first steps", lambda: "five steps" in job.output)
        job.wait_until("the step that looks after the batch host", lambda: len(job.steps()) == 2)
        cluster.lose(int(job.facts()["BatchHost"].removeprefix("node")))
        job.wait_until("its new start", lambda: job.facts()["Restarts"] == "1", 400)
        job.wait_until("its end", lambda: "result " in job.output, 400)
        assert len(starts(job.output)) == 2
        assert result in job.output
