"""A rank's standard output is a terminal only if that of `mpistrat run` is one."""

import os
import pty
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from mpi4py import MPI
print("terminal:", sys.stdout.isatty())
"""
pytestmark = [pytest.mark.full, pytest.mark.mpich]


def command(tmp_path):
    program = tmp_path / "prog.py"
    program.write_text(PROGRAM)
    return [sys.executable, "-m", "mpistrat", "run", "-n", "2", str(program)]


def test_in_a_pipe_and_in_a_file(tmp_path):
    with open(tmp_path / "log", "wb") as log:
        subprocess.run(command(tmp_path), stdout=log, check=True, timeout=60)
    assert (tmp_path / "log").read_bytes() == b"terminal: False\n" * 2
    ended = subprocess.run(command(tmp_path), stdout=subprocess.PIPE, check=True, timeout=60)
    assert ended.stdout == b"terminal: False\n" * 2


def test_in_a_terminal(tmp_path):
    mine, theirs = pty.openpty()
    subprocess.run(command(tmp_path), stdout=theirs, check=True, timeout=60)
    os.close(theirs)
    assert os.read(mine, 1000).replace(b"\r", b"") == b"terminal: True\n" * 2
    os.close(mine)
