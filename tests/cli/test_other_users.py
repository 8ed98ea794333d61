"""Commands in folders and with files of other users: no code of theirs runs, and no text commands the terminal."""

import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from mpistrat.cli import COMMANDS as ALL
from mpistrat.cli import commands

PLANTED = "import os\nos.write(2, b'PLANTED\\n')\nraise SystemExit(9)\n"
COMMANDS = [
    "run -n 2 {program}",
    "run -n 2 --dry-run {program}",
    "run -n 2 -m timeit -n 1 pass",  # the user's own module: only the command itself is meant
    "check",
    "check --gpu",
    "slurm write {program}",
    "top no-such-job",
    "top --here --json no-such-job",
    "info",
    "hosts",
    "bench tune -n 2 --sizes 1KiB --repetitions 1 --dry-run",
    "top --last",
    "data {program}",
    "shard {program} out -n 2",
    "trace . --summary",
    "checkpoint ls .",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    for name in ("mpi4py", "mpistrat", "numpy", "click"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(PLANTED)
    return folder


def test_each_command_is_here():
    assert {command.split()[0] for command in COMMANDS} == set(ALL)


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_planted_modules_are_not_imported(folder, tmp_path, command):
    (tmp_path / "program.py").write_text("print('came')\n")
    command = (
        os.path.join(os.path.dirname(sys.executable), "mpistrat")
        + " "
        + command.format(program=tmp_path / "program.py")
    )
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command.split(), cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=100
    )
    assert "PLANTED" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    if command.split()[1] == "run" and "--dry-run" not in command and "-m" not in command.split():
        assert done.stdout.count("came") == 2, done.stderr


def test_names_in_files_do_not_command_the_terminal(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x\x1b[2J\x07\x9b31m"] = np.zeros(3)
    (tmp_path / "b\x1b]0;title\x07.h5").write_bytes(b"no HDF5")
    (tmp_path / "c\x1b[2J").mkdir()
    for words in (["a.h5"], ["a.h5", "b\x1b]0;title\x07.h5"], ["c\x1b[2J"]):
        ended = CliRunner().invoke(commands, ["data", *(str(tmp_path / word) for word in words)])
        assert "x?[2J??31m" in ended.output or "c?[2J" in ended.output or "\\x1b" in ended.output
        assert all(each.isprintable() or each in "\n\t" for each in ended.output)
