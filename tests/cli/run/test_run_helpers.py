"""Processes that ranks leave behind, which hold the output of the job."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIMIT = 100

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="processes are not seen without /proc"),
]

# Rank 0 starts a process that heeds no signal, tells which one it is, and ends.
PROGRAM = """
import os, signal, subprocess, sys, time
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
status, holds = int(sys.argv[1]), sys.argv[2]
if rank == 0:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    streams = {"stdout": {"stderr": subprocess.DEVNULL}, "stderr": {"stdout": subprocess.DEVNULL}, "both": {}}
    helper = subprocess.Popen(["sleep", "900"], **streams[holds])
    os.write(1, f"helper {helper.pid}\\n".encode())
MPI.COMM_WORLD.Barrier()
os.write(1, f"rank {rank} ends\\n".encode())
sys.exit(status if rank == 1 else 0)
"""


def command_of(process):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ").strip()
    return ""


@pytest.fixture
def start(tmp_path):
    """Start the program under `mpistrat run`: `start(status, holds)` is the process of the command."""
    program = tmp_path / "prog.py"
    program.write_text(textwrap.dedent(PROGRAM))
    jobs = []

    def start(status, holds, ranks=2, command=("-m", "mpistrat")):
        with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
            jobs.append(
                subprocess.Popen(
                    [sys.executable, *command, "run", "-n", str(ranks), str(program), str(status), holds],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                )
            )
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
        job.wait()
    for helper in re.findall(r"helper (\d+)", (tmp_path / "out").read_text()):
        if command_of(int(helper)) == "sleep 900":
            os.kill(int(helper), signal.SIGKILL)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("holds", ["stdout", "stderr", "both"])
def test_job_that_succeeded_does_not_wait_for_a_helper(start, tmp_path, holds, ranks):
    assert start(0, holds, ranks).wait(LIMIT) == 0
    out, err = (tmp_path / "out").read_text(), (tmp_path / "err").read_text()
    assert sorted(re.findall(r"rank \d ends", out)) == [f"rank {rank} ends" for rank in range(ranks)]
    helper = int(re.search(r"helper (\d+)", out)[1])
    assert err == ""
    assert command_of(helper) == "sleep 900"


def test_job_that_failed_tells_its_status(start):
    assert start(3, "both").wait(LIMIT) == 3


def test_ranks_that_still_run_are_named(tmp_path):
    program = tmp_path / "prog.py"
    program.write_text(
        textwrap.dedent(
            """
            import os, signal, time
            from mpi4py import MPI
            signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"heard\\n"))
            MPI.COMM_WORLD.Barrier()
            os.write(1, f"process {os.getpid()}\\n".encode())
            while True:
                time.sleep(0.05)
            """
        )
    )
    with subprocess.Popen(
        [sys.executable, "-m", "mpistrat", "run", "-n", "2", str(program)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    ) as job:
        try:
            ranks = [int(job.stdout.readline().split()[1]) for _ in range(2)]
            for _ in range(2):
                job.send_signal(signal.SIGTERM)
                assert [job.stdout.readline() for _ in range(2)] == ["heard\n"] * 2
            for _ in range(2):
                job.send_signal(signal.SIGINT)
            _, err = job.communicate(timeout=LIMIT)
            for rank in ranks:
                assert f"(process {rank})" in err
            assert "SIGINT twice kills them" in err
        finally:
            job.kill()
