"""Tests of commands in surroundings that lack something: a disk with room, an open stream, a home."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from selection import core

ROOT = Path(__file__).parents[3]
MPISTRAT = f"{shlex.quote(sys.executable)} -m mpistrat"
COMMANDS = {
    "run": "run -n 2 {program}",
    "run --tag": "run -n 2 --tag {program}",
    "run --dry-run": "run -n 2 --dry-run {program}",
    "info": "info",
    "help": "--help",
}


@pytest.fixture
def shell(tmp_path):
    """Run a command in a shell: ``shell("run -n 2 {program}", ">&-", PROGRAM)``."""

    def shell(command, redirection="", program="print('said')", **environ):
        path = tmp_path / "prog.py"
        path.write_text(program)
        line = f"{MPISTRAT} {command.format(program=shlex.quote(str(path)))} {redirection}"
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
        return subprocess.run(
            ["/bin/sh", "-c", line],
            capture_output=True,
            text=True,
            timeout=60,
            env={name: value for name, value in environ.items() if value is not None},
        )

    return shell


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is a device of Linux")
@pytest.mark.parametrize("command", core(COMMANDS, "run"))
def test_a_full_disk_is_an_error(shell, command):
    ended = shell(COMMANDS[command], ">/dev/full")
    assert ended.returncode == 1
    assert "cannot be written: No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_reader_that_has_ended_is_no_news(shell):
    ended = shell("run -n 1 {program}", "| head -n 1", "for i in range(100_000): print(i)")
    assert ended.stdout == "0\n"
    assert "cannot be written" not in ended.stderr


@pytest.mark.parametrize("closed", core(["<&-", ">&-", "2>&-", "<&- >&- 2>&-"], ">&-", "<&- >&- 2>&-"))
@pytest.mark.parametrize("command", core(["run", "info"], "run"))
def test_streams_may_be_closed(shell, command, closed):
    ended = shell(COMMANDS[command], closed)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    if command == "run" and ">&-" not in closed.split():
        assert ended.stdout == "said\n" * 2


@pytest.mark.mpich
def test_a_home_is_not_needed(shell):
    ended = shell("run -n 2 {program}", program="from mpi4py import MPI; print('said')", HOME=None)
    assert (ended.returncode, ended.stdout) == (0, "said\n" * 2), ended.stderr


def test_no_room_for_temporary_files(shell, tmp_path):
    (tmp_path / "file").write_text("")
    ended = shell("run -n 2 {program}", PRTE_MCA_prte_tmpdir_base=str(tmp_path / "file" / "in"))
    assert ended.returncode == 1
    assert "fix: set TMPDIR" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.mpich
@pytest.mark.fault
def test_no_room_in_shared_memory(shell):
    program = "import os, signal; from mpi4py import MPI; os.kill(os.getpid(), signal.SIGBUS)"
    ended = shell("run -n 1 {program}", program=program)
    assert "df -h /dev/shm" in ended.stderr


@pytest.mark.full
def test_no_assertion_or_docstring_is_needed(shell, tmp_path):
    example = ROOT / "docs" / "examples" / "train_digits.py"
    options = f"--epochs 1 --out {shlex.quote(str(tmp_path))}"
    ended = shell(f"run -n 2 {shlex.quote(sys.executable)} -OO {shlex.quote(str(example))} {options}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "accuracy" in ended.stdout


def test_nothing_is_left_open(tmp_path):
    (tmp_path / "program.py").write_text("print('said')")
    command = [sys.executable, "-X", "dev", "-W", "error", "-m", "mpistrat", "run", "-n", "2", "program.py"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, ["said"] * 2, "")
