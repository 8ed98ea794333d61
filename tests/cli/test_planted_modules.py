"""No command imports code from the current directory, which may be another user's."""

import os
import subprocess
import sys

import pytest

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
    "bench allreduce -n 2 --sizes 1KiB --repetitions 1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    for name in ("mpi4py", "mpistrat", "numpy", "click"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(PLANTED)
    return folder


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
