"""Shared memory of killed ranks."""

import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mpistrat.cli.run import running_job

ROOT = Path(__file__).parents[3]
SHARED = Path("/dev/shm")

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="there is no /dev/shm")


@pytest.fixture
def make(monkeypatch):
    """Make a file in shared memory: `make(name)` is its path. In a folder, where no other job looks for its own."""
    with tempfile.TemporaryDirectory(dir=SHARED) as folder:
        monkeypatch.setattr(running_job, "SHARED", Path(folder))

        def make(name):
            path = Path(folder, name)
            path.write_bytes(b"x" * mmap.PAGESIZE)
            return path

        yield make


def test_only_what_is_new_and_not_used(make):
    old = make("mpich_shm_old")
    time.sleep(0.05)
    since = old.stat().st_ctime + 0.02
    left, used, other = make("mpich_shm_left"), make("sm_segment.used"), make("other_")
    just_made = make("vader_segment.made")
    with open(used, "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    # A process has a file open before it maps it.
    with mapping, open(just_made):
        removed = running_job.remove_leftovers(since)
    assert left in removed
    assert not left.exists()
    assert all(path.exists() for path in (old, used, other, just_made))


@pytest.mark.fault
def test_after_a_job_that_was_killed(tmp_path):
    program = tmp_path / "prog.py"
    program.write_text(
        "import os, re\n"
        "from mpi4py import MPI\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "names = re.findall(r'/dev/shm/[^ \\n]+', open('/proc/self/maps').read())\n"
        "os.write(1, ''.join(f'{name}\\n' for name in names).encode())\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mpistrat", "run", "-n", "2", str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode in (128 + 9, 9)  # MPICH tells the signal
    names = {name for name in done.stdout.split() if Path(name).name.startswith(("mpich_shm_", "sm_segment."))}
    assert names, done.stdout
    assert not [name for name in names if Path(name).exists()]


def test_records_of_ranks_are_left_to_the_command_of_their_job(monkeypatch, tmp_path):
    monkeypatch.setattr(running_job, "SHARED", tmp_path)
    record, memory = tmp_path / "mpistrat-record-1", tmp_path / "mpistrat-1"
    record.touch()
    memory.touch()
    assert running_job.remove_leftovers(0.0) == [memory]
    assert record.exists()
