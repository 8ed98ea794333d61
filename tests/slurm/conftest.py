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
from jobs import EXAMPLES, ROOT, SCRIPTS, SLOW, SLOW_WORDS, Job, run_here, submitted, with_digits

from mpistrat.cli.run.launcher import library_of
from mpistrat.runtime.process.launch import srun_plugin

SECONDS = pytest.StashKey[list[str]]()


@pytest.fixture
def record_seconds(
    request: pytest.FixtureRequest,
) -> Callable[[str], contextlib.AbstractContextManager[None]]:
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
def cluster(plugin: str) -> Iterator[clusters.Cluster]:
    """Three nodes with two GPUs each."""
    lacking = clusters.missing()
    if lacking is not None:
        pytest.skip(f"a Slurm of its own {lacking}")
    # A slurmstepd with PMIx that is killed while its rank is in MPI_Finalize tries for 32 s to reach the others, and
    # has the socket that the requeued step wants.
    with clusters.Cluster(requeue=5 if plugin == "pmi2" else 32) as started:
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
def submit_in(cluster: clusters.Cluster, environ: dict[str, str]) -> Callable[..., Job]:
    """``submit_in(folder, *arguments, **environ)``: a job submitted in a folder, by these words of sbatch."""
    return lambda folder, *arguments, **more: submitted(cluster, folder, *arguments, **{**environ, **more})


@pytest.fixture
def submit(submit_in: Callable[..., Job], tmp_path: Path) -> Callable[..., Job]:
    """``submit(*arguments, **environ)``: a job submitted in the test's own folder."""
    return lambda *arguments, **more: submit_in(tmp_path, *arguments, **more)


@pytest.fixture
def run_job(submit: Callable[..., Job]) -> Callable[..., str]:
    """``run_job(*arguments, **environ)``: the output of a job that has to succeed."""

    def run(*arguments: str | Path, **more: str) -> str:
        __tracebackhide__ = True
        for _ in range(2):
            job = submit(*arguments, **more)
            job.wait_until("its end", lambda job=job: job.is_over() or job.is_stuck())
            if not job.is_stuck():
                return job.ended()
            job.scancel("--signal=KILL", "--full")
            job.wait_until("its end", job.is_over)
        return submit(*arguments, **more).ended()

    return run


@pytest.fixture(scope="session")
def submit_slow(
    submit_in: Callable[..., Job], digits: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Job, Path]]:
    """``submit_slow(*options)``: a job on all nodes that takes its time, and the folder of its result."""

    def submit(*options: str) -> tuple[Job, Path]:
        folder = tmp_path_factory.mktemp("slow")
        program = folder / "slow.py"
        program.write_text(SLOW)
        with_digits(folder / "out", digits)
        wanted = ["--nodes=3", "--ntasks=3", "--ntasks-per-node=1", *options]
        return submit_in(folder, *wanted, SCRIPTS / "requeue.sbatch", program, *SLOW_WORDS), folder

    return submit


@pytest.fixture(scope="session")
def limited(submit_slow: Callable[..., tuple[Job, Path]]) -> tuple[Job, Path]:
    """A job with more to do than its limit allows; it comes back while the other tests run."""
    return submit_slow("--time=1", "--signal=USR2@10")


@pytest.fixture(scope="session")
def signalled(submit_slow: Callable[..., tuple[Job, Path]]) -> tuple[Job, Path]:
    """A job that got its signal from outside; it comes back like the other."""
    job, folder = submit_slow()
    job.wait_until("its first steps", lambda: job.output.count("a slow step") > 9)
    job.scancel("--signal=USR2")
    return job, folder
