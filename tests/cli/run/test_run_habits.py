"""`mpistrat run` takes what people are used to type after mpirun."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpistrat.cli import commands
from mpistrat.cli.run import job


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What the ranks would run: `started(arguments)`."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    found = job.Launcher("/mpirun", "openmpi", (5, 0, 0))
    monkeypatch.setattr(job, "find", lambda wanted=None: found)

    def started(*arguments):
        result = CliRunner().invoke(commands, ["run", "--dry-run", *arguments])
        if result.exit_code:
            return result.output
        line = result.output.splitlines()[0].split()
        return line[line.index("-n") + 1], line[line.index(sys.executable) + 1 :]

    return started


@pytest.mark.parametrize("ranks", [["-n", "2"], ["-np", "2"], ["-n2"]])
@pytest.mark.parametrize("python", [[], ["python"], ["python3"], ["python3.12"], [sys.executable]])
def test_ranks_and_python(started, ranks, python):
    assert started(*ranks, *python, "x.py", "-n", "7", "-m", "y") == ("2", ["x.py", "-n", "7", "-m", "y"])


def test_options_of_python(started):
    assert started("-n", "3", "python", "-u", "x.py") == ("3", ["-u", "x.py"])
    assert started("-np", "3", "python", "-m", "pkg", "-x") == ("3", ["-m", "pkg", "-x"])
    assert started("-np", "3", "-m", "pkg", "-np", "1") == ("3", ["-m", "pkg", "-np", "1"])


def test_another_python_is_refused(started):
    assert "is another Python than" in started("-n", "2", "/elsewhere/bin/python3", "x.py")
    assert "give a program after `python`" in started("-n", "2", "python")
    assert "there is no program 'y.py'" in started("-n", "2", "y.py")
