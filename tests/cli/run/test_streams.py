"""The copy of what ranks print: complete for a slow reader, and read to its end if it cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.cli.run.streams import Streams

ROOT = Path(__file__).parents[3]
# More than two pipes and a block hold, and then a line without an end.
LINES = "import os\nfor _ in range(5000): os.write(1, b'x' * 99 + b'\\n')\nos.write(1, b'no end')"
PROGRAM = """
import os, subprocess, sys, tempfile
from pathlib import Path
from mpistrat.cli.run.streams import Streams
with tempfile.TemporaryDirectory() as folder:
    streams = Streams(Path(folder), 1)
    errors = []
    streams.start(lambda: errors.append("write"))
    rank = [*streams.around([sys.executable, "-c", sys.argv[2]])]
    subprocess.run(rank, env={**os.environ, "PMI_RANK": "0"}, check=True)
    streams.finish()
    assert len(errors) == len(streams.write_errors) == int(sys.argv[1]), errors
    assert streams.line_ended
"""


def start(target, failures, errors=None, program=LINES):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(failures), program],
        stdin=subprocess.DEVNULL,
        stdout=target,
        stderr=errors,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.full
def test_a_slow_reader_gets_all():
    job = start(subprocess.PIPE, 0)
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(3)  # nothing is read meanwhile
    with job.stdout:
        assert job.stdout.read() == (b"x" * 99 + b"\n") * 5000 + b"no end"
    assert job.wait(60) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is a device of Linux")
def test_a_full_disk_does_not_stop_the_rank():
    with open("/dev/full", "wb", buffering=0) as full:
        assert start(full, 1).wait(60) == 0


def test_the_banner_that_a_rank_prints_itself_is_left_out():
    line = "-" * 74 + "\n"
    banner = f"{line}MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n\nNOTE: ...\n{line}"
    program = "import os\n" + "".join(f"os.write(2, {each.encode()!r})\n" for each in ("before\n", banner, line))
    job = start(subprocess.DEVNULL, 0, subprocess.PIPE, program)
    with job.stderr:
        assert job.stderr.read().decode() == f"before\n{line}"
    assert job.wait(60) == 0


def test_channels_of_a_job_that_never_ran_are_closed(tmp_path):
    found = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        Streams(folder, 3).close()
        found.append(len(os.listdir("/dev/fd")))
    assert found[0] == found[1]
