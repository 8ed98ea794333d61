"""What the tests on a real Slurm share: the cluster, and jobs on it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cluster as clusters
import pytest
from jobs import EXAMPLES, FARM, ROOT, SCRIPTS, SLOW, SLOW_WORDS, Job, run_here, submitted, unstuck, with_digits

from mpistrat.cli.run.job import library_of
from mpistrat.launch.srun_types import srun_plugin

SECONDS = pytest.StashKey[list[str]]()


@pytest.fixture
def record_seconds(request: pytest.FixtureRequest) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    """``with record_seconds(what)``: how long it took is printed at the end of the test run."""

    @contextlib.contextmanager
    def measured(what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        lines = request.config.stash.setdefault(SECONDS, [])
        lines.append(f"{what}: {time.monotonic() - start:.1f} s")

    return measured


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(SECONDS, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def plugin() -> str:
    """What ``srun --mpi=`` has to be for the MPI beside this Python."""
    found = srun_plugin(library_of(sys.executable))
    assert found is not None
    return found


@pytest.fixture(scope="session")
def can_run() -> None:
    """That this machine can run a Slurm."""
    lacking = clusters.missing()
    if lacking is not None:
        pytest.skip(f"a Slurm of its own {lacking}")


@pytest.fixture(scope="session")
def cluster(can_run: None) -> Iterator[clusters.Cluster]:
    """Three nodes with two GPUs each."""
    with clusters.Cluster() as started:
        yield started


@pytest.fixture(scope="session")
def stopping(can_run: None) -> Iterator[clusters.Cluster]:
    """Another Slurm for jobs that are stopped: their nodes may be taken for half a minute until the last rank has left.

    In the partitions low and high of node3, a job has to make room for another one.
    """
    with clusters.Cluster(4, clusters.PREEMPTION) as started:
        yield started


@pytest.fixture(scope="session")
def environ(plugin: str) -> dict[str, str]:
    """What jobs need to find this Python and the package, and to share few cores."""
    return {
        "PYTHON": sys.executable,
        "MPISTRAT_SRUN_MPI": plugin,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "MPLBACKEND": "Agg",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
        "SLURM_PMIX_FENCE": "ring",  # for jobs that no script starts, which say it themselves
        "UCX_TLS": "tcp,self",  # ranks of MPICH then have short addresses, see HALF_A_MESSAGE
    }


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of the examples: to write it takes them longer than all else."""
    folder = tmp_path_factory.mktemp("digits")
    write = "import sys, pathlib, train_digits; train_digits.write_digits(pathlib.Path(sys.argv[1]))"
    run_here("-c", f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); {write}", folder)
    return folder


@pytest.fixture(scope="session")
def submit_to_stop(stopping: clusters.Cluster, environ: dict[str, str]) -> Callable[..., Job]:
    """``submit_to_stop(folder, *arguments, **environ)``: a job in the other Slurm, submitted in a folder."""
    return lambda folder, *arguments, **more: submitted(stopping, folder, *arguments, **{**environ, **more})


@pytest.fixture
def submit(cluster: clusters.Cluster, environ: dict[str, str], tmp_path: Path) -> Callable[..., Job]:
    """``submit(*arguments, **environ)``: a job submitted in the test's own folder, by these words of sbatch."""
    return lambda *arguments, **more: submitted(cluster, tmp_path, *arguments, **{**environ, **more})


@pytest.fixture
def run_job(submit: Callable[..., Job]) -> Callable[..., str]:
    """``run_job(*arguments, **environ)``: the output of a job that has to succeed."""

    def run(*arguments: str | Path, **more: str) -> str:
        __tracebackhide__ = True
        return unstuck(lambda: submit(*arguments, **more), "its end", Job.is_over).ended()

    return run


@pytest.fixture(scope="session")
def submit_slow(
    submit_to_stop: Callable[..., Job], digits: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Job]:
    """``submit_slow(*options)``: a job on three nodes that takes its time, and is past its first steps."""

    def submit(*options: str) -> Job:
        folder = tmp_path_factory.mktemp("slow")
        program = folder / "slow.py"
        program.write_text(SLOW)
        with_digits(folder / "out", digits)
        wanted = ["--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--nodelist=node[0-2]", *options]
        return submit_to_stop(folder, *wanted, SCRIPTS / "requeue.sbatch", program, *SLOW_WORDS)

    return lambda *options: unstuck(
        lambda: submit(*options), "its first steps", lambda job: job.output.count("a slow step") > 9
    )


def begun(start: Callable[[], Job]) -> Callable[[], Job]:
    """What `start` returns, which is called now; once more each further time."""
    first = [start()]
    return lambda: first.pop() if first else start()


@pytest.fixture(scope="session")
def limited(submit_slow: Callable[..., Job]) -> Callable[[], Job]:
    """A job with more to do than its limit allows; it gets the signal while the other tests run.

    Slurm looks each 30 s whether a job is 240 to 270 s before its limit. The limit becomes so short only when the
    handler is there, and so long again before the job comes back that this run gets no signal.
    """

    def start() -> Job:
        job = submit_slow("--signal=USR2@240")
        job.scontrol("hold", job.number)  # when it has been put back
        hours, minutes, _ = map(int, job.facts()["RunTime"].split(":"))
        job.scontrol("update", f"JobId={job.number}", f"TimeLimit={hours * 60 + minutes + 4}")
        return job

    started = begun(start)

    def comes_back() -> Job:
        job = started()
        job.wait_until("its way back into the queue", job.is_back)
        job.scontrol("update", f"JobId={job.number}", "TimeLimit=60")
        job.scontrol("release", job.number)
        return job

    return comes_back


@pytest.fixture(scope="session")
def signalled(submit_slow: Callable[..., Job]) -> Callable[[], Job]:
    """A job that gets its signal from outside; it comes back while the other tests run."""

    def start() -> Job:
        job = submit_slow()
        job.scancel("--signal=USR2")
        return job

    return begun(start)


@pytest.fixture(scope="session")
def farm(submit_to_stop: Callable[..., Job], plugin: str, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A task farm whose time limit is a minute. It comes back while the other tests run."""
    folder = tmp_path_factory.mktemp("farm")
    (folder / "farm.py").write_text(FARM)
    wanted = ["--time=1", "--signal=B:USR2@1", "--nodes=1", "--ntasks=3", "--ntasks-per-node=3", "--nodelist=node2"]
    job = submit_to_stop(folder, *wanted, SCRIPTS / "farm.sbatch", "farm.py")
    if plugin == "pmi2":  # the limit itself is tested with Open MPI
        ran = folder / "ran-0"
        job.wait_until("its first calls", lambda: ran.exists() and len(ran.read_text().split()) > 9)
        job.scontrol("requeue", job.number)
    return job
