"""The output of ranks: a file for each, and a terminal only if the command has one."""

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


TELLS = """
import sys
from mpi4py import MPI
print("terminal:", sys.stdout.isatty())
"""


def command(tmp_path):
    program = tmp_path / "prog.py"
    program.write_text(TELLS)
    return [sys.executable, "-m", "mpistrat", "run", "-n", "2", str(program)]


@pytest.mark.full
@pytest.mark.mpich
def test_in_a_pipe_and_in_a_file(tmp_path):
    with open(tmp_path / "log", "wb") as log:
        subprocess.run(command(tmp_path), stdout=log, check=True, timeout=60)
    assert (tmp_path / "log").read_bytes() == b"terminal: False\n" * 2
    ended = subprocess.run(command(tmp_path), stdout=subprocess.PIPE, check=True, timeout=60)
    assert ended.stdout == b"terminal: False\n" * 2


@pytest.mark.full
@pytest.mark.mpich
def test_in_a_terminal(tmp_path):
    mine, theirs = pty.openpty()
    subprocess.run(command(tmp_path), stdout=theirs, check=True, timeout=60)
    os.close(theirs)
    assert os.read(mine, 1000).replace(b"\r", b"") == b"terminal: True\n" * 2
    os.close(mine)
