"""``mpistrat top``: jobs that run, and jobs that have ended."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpistrat.cli import commands
from mpistrat.cli import top as top_command
from mpistrat.record import read

PROGRAM = """
import sys, threading, time
import numpy as np
import mpistrat
strategy = mpistrat.MultiWorkerMirroredStrategy()
for _ in range(3):
    strategy.run(lambda: strategy.extended)
    strategy.reduce("SUM", np.ones(3), axis=None)
print("ready", flush=True)
exec(sys.argv[1])
"""


def top(*arguments):
    """What the command prints, and its exit status."""
    ended = CliRunner().invoke(commands, ["top", *arguments])
    return ended.output, ended.exit_code


def process_state(process):
    return json.loads(top("--json", str(process.pid))[0])[0]["state"]


def until(condition):
    """Wait until a condition holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline


@contextlib.contextmanager
def job(line):
    """A job of one rank that runs, and is at a line."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("this machine has no /dev/shm")
    with subprocess.Popen([sys.executable, "-c", PROGRAM, line], stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout.readline() == "ready\n"
            until(lambda: process_state(started) == "S")
            yield started
        finally:
            started.kill()
            started.wait()
    for record in read.records():
        if record.pid == started.pid:
            os.unlink(record.path)


@pytest.fixture(scope="module")
def process():
    with job("threading.Event().wait()") as started:
        until(lambda: "<string>:10" in top("--stacks", str(started.pid))[0])
        yield started


@pytest.mark.full
def test_the_values_of_a_rank(process):
    output, status = top("--json", str(process.pid))
    assert status == 0, output
    (row,) = json.loads(output)
    assert (row["rank"], row["pid"], row["step"], row["phase"]) == (0, process.pid, 2, "user code")
    assert row["resident_bytes"] > 1 << 20
    assert row["state"] == "S"


@pytest.mark.full
def test_ranks_of_one_node_have_short_lines(process, monkeypatch):
    """What srun prints of several nodes is joined: it mixes parts of lines longer than 1,024 bytes."""
    rows = [{"rank": rank, "pid": 1, "collective": "x" * 500} for rank in range(4)]
    monkeypatch.setattr(top_command, "rows", lambda records: rows)
    output, status = top("--json", "--here", str(process.pid))
    assert status == 0, output
    assert [json.loads(line) for line in output.splitlines()] == [[row] for row in rows]
    assert top_command.rows_in(output.splitlines()) == rows


@pytest.mark.full
def test_the_table_and_the_stacks(process):
    output, status = top("--once", str(process.pid))
    assert status == 0, output
    assert "step time" in output
    assert str(process.pid) in output
    output, status = top("--stacks", str(process.pid))
    assert status == 0, output
    assert "rank 0: user code" in output
    assert "<string>:10 in <module>" in output


@pytest.mark.full
def test_a_rank_alone_goes_on_waiting():
    """It has no thread that could tell its stack, and the signal for it would end this call."""
    with job("import signal; signal.pause(); print('went on', flush=True)") as started:
        output, status = top("--stacks", str(started.pid))
        assert status == 0, output
        assert "in pause()\n    no stack: " in output
        assert process_state(started) == "S"
        assert not select.select([started.stdout], [], [], 0.5)[0]


@pytest.mark.full
def test_several_jobs_to_choose_from(process):
    """On a terminal: a list, the table of the job that was chosen, and q."""
    with job("threading.Event().wait()"):
        output, status = top("--once")
        assert status == 1
        assert "several jobs of this user run on this node: name one by a process of it" in output
        terminal, theirs = pty.openpty()
        environ = {**os.environ, "COLUMNS": "160", "TERM": "xterm"}
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        command = [sys.executable, "-m", "mpistrat", "top"]
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ) as started:
            os.close(theirs)
            shown = ""

            def read_until(text):
                nonlocal shown
                deadline = time.monotonic() + 60
                while not re.search(text, shown):
                    assert time.monotonic() < deadline, shown
                    if select.select([terminal], [], [], 0.1)[0]:
                        shown += os.read(terminal, 1 << 16).decode()
                return re.search(text, shown)

            number = read_until(rf"(\d+) +1 rank  process {process.pid} +-c(?s:.*)job.*: ")[1]
            os.write(terminal, f"{number}\n".encode())
            read_until(rf"waits(?s:.*){process.pid}(?s:.*)wait\(\): 1 rank")
            os.write(terminal, b"q")
            started.wait(60)
        os.close(terminal)
    assert started.returncode == 0


@pytest.mark.full
def test_a_process_that_is_stopped_has_no_stack(process):
    os.kill(process.pid, signal.SIGSTOP)
    try:
        until(lambda: process_state(process) == "T")
        output, status = top("--stacks", str(process.pid))
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert status == 0, output
    assert "stopped" in output
    assert "<string>:10" not in output


@pytest.mark.parametrize("what", ["0", "no-such-job"])
def test_a_job_that_does_not_exist(what, monkeypatch):
    monkeypatch.setenv("PATH", "")
    output, status = top("--json", "--here", what)
    assert status == 1
    assert f"no job {what} of this user runs on this node" in output


def test_ranks_on_all_nodes_of_a_slurm_job(tmp_path, monkeypatch):
    """A stand-in for srun runs what it is given on two nodes."""
    rows = [[{"rank": rank, "pid": 1}] for rank in (1, 0)]
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n" + "".join(f"echo '{json.dumps(each)}'\n" for each in rows) + 'echo "$@" >&2\n')
    srun.chmod(0o755)
    (tmp_path / "squeue").symlink_to("/bin/false")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    output, status = top("--json", "4242424242")
    assert status == 0, output
    assert [each["rank"] for each in json.loads(output)] == [0, 1]
    srun.write_text("#!/bin/sh\necho 'srun: error: Invalid job id' >&2\nexit 1\n")
    output, status = top("--json", "4242424242")
    assert status == 1
    assert "Invalid job id" in output


def test_the_record_of_a_job_that_never_was(tmp_path, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RECORD_DIR", str(tmp_path))
    monkeypatch.setattr("mpistrat.record.read.records", list)
    output, status = top("--last")
    assert status == 1
    assert "MPISTRAT_RECORD_DIR" in output
    (tmp_path / "last-1-1.json").write_text('{"records": 1')
    output, status = top("--last")
    assert status == 1
    assert "remove it" in output
