"""Jobs on the test cluster, and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cluster as clusters
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "slurm"
EXAMPLES = ROOT / "docs" / "examples"
OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")

# Slurm 22.05 now and then takes half of a message of MPICH for a whole one: the ranks fail, or wait for ever.
HALF_A_MESSAGE = "mpi/pmi2: value not properly terminated"
# What srun says when a slurmd has died, see SLURMD.
NO_ANSWER = "Zero Bytes were transmitted or received"

# The example, slow enough in its first run to be met by a signal.
SLOW = f"""
import os, sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
import resume_digits
from resume_digits import digits
if "SLURM_RESTART_COUNT" not in os.environ:
    fast = digits.loss_and_gradients
    def slow(*arguments):
        time.sleep(0.5)
        print("a slow step", flush=True)
        return fast(*arguments)
    digits.loss_and_gradients = slow
resume_digits.train(resume_digits.parse())
"""
SLOW_WORDS = ["--epochs", "20", "--dtype", "float64", "--out", "out"]
SLOW_STEPS = 20 * 12

# How often the time limit, a minute, ends a farm of 1,000 calls. Each time takes Slurm two minutes, so that three need
# `-o faulthandler_timeout=1400`.
FARM_LIMITS = int(os.environ.get("MPISTRAT_TEST_FARM_LIMITS", "1"))
# Its first runs do 240 calls a minute at most, with two workers.
FARM = f"""
import os, time
from mpistrat.coordinator import Executor
def square(i):
    with open(f"ran-{{os.environ.get('SLURM_RESTART_COUNT', 0)}}", "a") as file:
        file.write(f"{{i}}\\n")
    time.sleep(0.5 if int(os.environ.get("SLURM_RESTART_COUNT", 0)) < {FARM_LIMITS} else 0)
    return i * i, 1 / (i + 1)
with Executor() as executor:
    if executor is not None:
        results = list(executor.map(square, range(1000), keep="results.h5"))
        assert results == [(i * i, 1 / (i + 1)) for i in range(1000)]
        print("1000 results as in one process", flush=True)
"""


class Job:
    """A job of the test cluster.

    Attributes
    ----------
    cluster : Cluster
        Where it runs.
    number : str
        As sbatch says it.
    folder : Path
        Where it was submitted.
    """

    def __init__(self, cluster: clusters.Cluster, number: str, folder: Path):
        self.cluster = cluster
        self.folder = folder
        self.number = number
        self._without_step: float | None = None
        self._looked = 0.0

    @property
    def output(self) -> str:
        """All that it has printed so far."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"job-{self.number}[.-]*")))

    def states(self) -> list[str]:
        """The state of each of its parts."""
        said = self.cluster.run("squeue", "-h", "-t", "all", "-o", "%T", "-j", self.number).stdout
        return said.split()

    def steps(self) -> list[str]:
        """The steps that srun has started and that have not ended, as JOB.NUMBER."""
        listed = self.cluster.run("squeue", "-h", "--steps", "-o", "%i", "-j", self.number).stdout.split()
        return [step for step in listed if step.rpartition(".")[2].isdecimal()]

    def is_stuck(self) -> bool:
        """Whether Slurm itself keeps it from its end.

        Beside what it says itself: with PMIx, srun of Slurm 22.05 now and then waits for a thread of its own for ever
        when a heterogeneous step has ended (``pmixp_abort_agent_stop``). The job then has no step any more.
        """
        if is_fault_of_slurm(self.output):
            return True
        if time.monotonic() > self._looked + 1:  # to ask takes the processor from the job
            self._looked = time.monotonic()
            if self.states()[:1] != ["RUNNING"] or self.steps():
                self._without_step = None
            elif self._without_step is None:
                self._without_step = time.monotonic()
        return self._without_step is not None and time.monotonic() - self._without_step > 30

    def facts(self) -> dict[str, str]:
        """What Slurm tells of it, by name."""
        said = self.cluster.run("scontrol", "show", "job", "--oneliner", self.number).stdout
        return {name: each for name, _, each in (word.partition("=") for word in said.split())}

    def is_back(self) -> bool:
        """Whether it was put back into the queue once, and the run before is over."""
        facts = self.facts()
        return facts.get("Restarts") == "1" and facts["JobState"] in (*OVER, "PENDING", "RUNNING")

    def scontrol(self, *words: str) -> None:
        ended = self.cluster.run("scontrol", *words)
        assert ended.returncode == 0, ended.stdout

    def scancel(self, *options: str) -> None:
        ended = self.cluster.run("scancel", *options, self.number)
        assert ended.returncode == 0 or self.is_over(), ended.stdout

    def wait_until(self, what: str, condition: Callable[[], bool], limit: float = 200) -> None:
        """Wait for something that happens to this job, or fail with its output."""
        end = time.monotonic() + limit
        while not condition():
            if time.monotonic() > end:
                pytest.fail(f"job {self.number}: waited {limit} s for {what}: {self}", pytrace=False)
            time.sleep(0.1)

    def is_over(self) -> bool:
        return all(each in OVER for each in self.states())

    def ended(self, state: str = "COMPLETED", limit: float = 200) -> str:
        """Wait for its end, which must be of this kind; returns the output."""
        __tracebackhide__ = True
        self.wait_until("its end", self.is_over, limit)
        if set(self.states()) != {state}:
            pytest.fail(f"job {self.number} should be {state}: {self}", pytrace=False)
        return self.output

    def __str__(self) -> str:
        return f"{self.states()}\n{self.output}\n{self.cluster.logs()}"


def is_fault_of_slurm(output: str) -> bool:
    """Whether Slurm itself says why a job failed."""
    return HALF_A_MESSAGE in output or NO_ANSWER in output


def submitted(cluster: clusters.Cluster, folder: Path, *arguments: str | Path, **environ: str) -> Job:
    """A job that is submitted in a folder, by these words of sbatch."""
    pattern = "job-%A-%a.out" if SCRIPTS / "array.sbatch" in arguments else "job-%j.out"
    words = ["sbatch", "--parsable", f"--output={folder}/{pattern}", *arguments]
    said = cluster.run(*words, cwd=folder, **environ)
    assert said.returncode == 0, said.stdout
    return Job(cluster, said.stdout.split()[-1], folder)


def unstuck(start: Callable[[], Job], what: str, condition: Callable[[Job], bool]) -> Job:
    """A job for which something has happened. One that Slurm itself keeps from it is started again, twice."""
    for _ in range(2):
        job = start()
        job.wait_until(what, lambda job=job: condition(job) or job.is_stuck())
        if not job.is_stuck():
            return job
        job.scancel("--signal=KILL", "--full")
        job.wait_until("its end", job.is_over)
    job = start()
    job.wait_until(what, lambda: condition(job))
    return job


def with_digits(out: Path, digits: Path) -> Path:
    """A folder for what ``resume_digits.py`` writes that has the data already."""
    out.mkdir()
    (out / "data").symlink_to(digits)
    return out


def lines(output: str) -> list[dict]:
    """The lines of JSON in an output, in the order of ``rank`` in them."""
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda line: line["rank"])


def run_here(*arguments: str | Path, cwd: Path | None = None, **environ: str) -> str:
    """The output of this Python, alone and outside of the cluster."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "MPLBACKEND": "Agg",
            "OMP_NUM_THREADS": "1",  # more would wait for processors that jobs have
            "OMPI_MCA_btl": "^ofi",
            **environ,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout
