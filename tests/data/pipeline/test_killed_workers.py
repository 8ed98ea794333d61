"""What is left when a rank, one of its worker processes or the launcher is killed: nothing.

``MPISTRAT_TEST_KILLS=100`` draws so many kills.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_workers_program.py")
SHARED = Path("/dev/shm")
KINDS = ("works", "waits", "endless", "keeps the GIL", "has a child")
MARK = "MPISTRAT_TEST_MARK"
DRAWN = int(os.environ.get("MPISTRAT_TEST_KILLS", "6"))
RANDOM = random.Random(7)
KILLS = [
    (RANDOM.choice(KINDS), RANDOM.choice(["rank", "worker", "launcher"]), RANDOM.choice([1, 2])) for _ in range(DRAWN)
]

pytestmark = [pytest.mark.fault, pytest.mark.skipif(not SHARED.is_dir(), reason="there is no /dev/shm")]


def processes(mark):
    """The processes that have a mark in their environment, with their commands. Zombies have no environment."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (each / "environ").read_bytes().split(b"\0"):
                found[int(each.name)] = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def numbers(folder, prefix):
    return [int(path.name.partition("-")[2]) for path in folder.glob(f"{prefix}-*")]


def files(pid):
    """The files in shared memory that a process has mapped. Jobs beside this one have others.

    Without the record of a rank: it is to be read after a kill, and the next job removes it.
    """
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {
            path
            for line in lines
            if (path := line.split(maxsplit=5)[-1]).startswith(f"{SHARED}/") and "mpistrat-record-" not in line
        }
    return set()


@pytest.mark.parametrize(("kind", "killed", "ranks"), KILLS)
def test_nothing_is_left(tmp_path, kind, killed, ranks):
    mark = tmp_path.name + str(os.getpid())
    job = subprocess.Popen(
        [sys.executable, "-m", "mpistrat", "run", "-n", str(ranks), str(PROGRAM), str(tmp_path), kind],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert wait_until(lambda: len(numbers(tmp_path, "worker")) == 2 * ranks, 60), job.communicate()
        assert not any(map(files, numbers(tmp_path, "worker")))
        shared = set().union(*map(files, processes(mark)))
        time.sleep(RANDOM.random() / 10)
        victim = job.pid if killed == "launcher" else RANDOM.choice(numbers(tmp_path, killed))
        os.kill(victim, signal.SIGKILL)
        if killed == "worker" and kind == "waits":  # its rank learns of it with the next batch
            assert wait_until(lambda: victim not in processes(mark), 1)
            os.kill(numbers(tmp_path, "rank")[0], signal.SIGKILL)
        output, _ = job.communicate(timeout=60)
        if killed == "worker" and kind != "waits":
            assert f"worker process {victim} of map() was killed by signal 9 (SIGKILL)" in output
        assert wait_until(lambda: not processes(mark), 1), processes(mark)
        assert wait_until(lambda: not any(map(os.path.exists, shared)), 1), shared
    finally:
        for each in processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
