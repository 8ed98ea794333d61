"""The output of ranks: a file for each, and a terminal only if the command has one."""

import contextlib
import os
import pty
import subprocess
import sys

import pytest
from click.testing import CliRunner

from mpistrat.cli import commands

PROGRAM = """
import sys
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
print("out", rank, sys.stdout.isatty(), flush=True)
print("err", rank, file=sys.stderr)
MPI.COMM_WORLD.Barrier()
sys.exit(3 if rank == 1 else 0)
"""


@pytest.mark.full
@pytest.mark.mpich
def test_a_file_for_each_rank(run_alone, tmp_path):
    (tmp_path / "prog.py").write_text(PROGRAM)
    logs = tmp_path / "some logs"
    output = ("--output", f"{logs}/of %(rank)d.txt")
    ended = run_alone("-m", "mpistrat", "run", "-n", "2", *output, tmp_path / "prog.py")
    assert ended.status == 3
    assert "out" not in ended.output.split()
    assert sorted(path.name for path in logs.iterdir()) == ["of 0.txt", "of 1.txt"]
    for rank in range(2):
        lines = (logs / f"of {rank}.txt").read_text().splitlines()
        assert {f"out {rank} False", f"err {rank}"} <= set(lines)


@pytest.mark.parametrize("output", ["log", "log.%d", "log.%(rank)d.%(rank)d", "log.%(rank)d.%s"])
def test_other_patterns_are_refused(tmp_path, output):
    (tmp_path / "x.py").touch()
    result = CliRunner().invoke(commands, ["run", "--output", output, "--dry-run", str(tmp_path / "x.py")])
    assert result.exit_code == 2
    assert "give one %(rank)d" in result.output


PIECES = """
import os, subprocess, sys
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
for i in range(300):
    os.write(1, b"a line of ")
    os.write(1, b"rank %d\\n" % rank)
print("to errors", file=sys.stderr)
if rank == 1:
    subprocess.Popen([sys.executable, "-c", "import time; print('left behind', flush=True); time.sleep(60)"])
os.write(1, b"no end")
sys.exit(3 * rank)
"""


@pytest.mark.full
@pytest.mark.mpich
def test_lines_with_the_number_of_the_rank(tmp_path):
    (tmp_path / "prog.py").write_text(PIECES)
    command = [sys.executable, "-m", "mpistrat", "run", "-n", "2", "--tag", tmp_path / "prog.py"]
    ended = subprocess.run(command, capture_output=True, timeout=250, check=False)
    assert ended.returncode == 3
    expected = [f"[{rank}] a line of rank {rank}" for rank in range(2) for _ in range(300)]
    lines = ended.stdout.decode().splitlines()
    left = {"[0] no end", "[1] no end", "[1] left behind", "[1] no endleft behind"}
    assert sorted(line for line in lines if line not in left) == expected
    assert any(line.startswith("[1] no end") for line in lines)
    assert {"[0] to errors", "[1] to errors"} <= set(ended.stderr.decode().splitlines())


def test_tags_are_for_one_output(tmp_path):
    (tmp_path / "x.py").touch()
    options = ["--tag", "--output", "log.%(rank)d", str(tmp_path / "x.py")]
    result = CliRunner().invoke(commands, ["run", *options])
    assert result.exit_code == 2
    assert "give --tag or --output" in result.output


TELLS = """
import sys
from mpi4py import MPI
sys.stdout.write(f"terminal: {sys.stdout.isatty()}\\n")  # in one piece, also unbuffered
"""


def command(tmp_path):
    program = tmp_path / "prog.py"
    program.write_text(TELLS)
    return [sys.executable, "-m", "mpistrat", "run", "-n", "2", str(program)]


@pytest.mark.full
@pytest.mark.mpich
def test_in_a_pipe_and_in_a_file(tmp_path):
    with open(tmp_path / "log", "wb") as log:
        subprocess.run(command(tmp_path), stdout=log, check=True, timeout=250)
    assert (tmp_path / "log").read_bytes() == b"terminal: False\n" * 2
    ended = subprocess.run(command(tmp_path), stdout=subprocess.PIPE, check=True, timeout=250)
    assert ended.stdout == b"terminal: False\n" * 2


@pytest.mark.full
@pytest.mark.mpich
def test_in_a_terminal(tmp_path):
    mine, theirs = pty.openpty()
    subprocess.run(command(tmp_path), stdout=theirs, check=True, timeout=250)
    os.close(theirs)
    output = b""
    with contextlib.suppress(OSError):  # its end
        while data := os.read(mine, 1000):
            output += data
    os.close(mine)
    assert output.replace(b"\r", b"") == b"terminal: True\n" * 2
