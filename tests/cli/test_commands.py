"""The commands, what they import, and `mpistrat info`."""

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mpistrat.cli import COMMANDS, GROUPS, commands
from mpistrat.cli.bench import SUBJECTS
from mpistrat.cli.info import info
from mpistrat.version import __version__

ROOT = Path(__file__).parents[2]
HEAVY = ("mpi4py.MPI", "numpy", "h5py", "rich", "cupy")


def invoke(*arguments):
    return CliRunner().invoke(commands, list(arguments))


def test_help_lists_the_commands():
    result = invoke("--help")
    assert result.exit_code == 0
    for name, (_, line) in COMMANDS.items():
        assert name in result.output
        assert line in " ".join(result.output.split())
    assert invoke("--version").output == f"mpistrat, version {__version__}\n"


def test_help_has_groups_and_no_command_shows_the_first_steps():
    assert re.findall(r"^(\w.*):$", invoke("--help").output, re.MULTILINE) == ["Options", *GROUPS]
    coloured = CliRunner().invoke(commands, ["--help"], color=True).output
    assert click.style("Files", bold=True) in coloured
    result = invoke()
    assert result.exit_code == 0
    assert len(re.findall(r"^  mpistrat \w+", result.output, re.MULTILINE)) == 3


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_file(name):
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: commands {name} ")


def test_no_such_command():
    result = invoke("fly")
    assert result.exit_code == 2
    assert "No such command 'fly': there are run, slurm" in result.output


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ("rnu -n 2 x.py", "No such command 'rnu': did you mean 'run'?"),
        ("-n 2 x.py", "No such option '-n': programs are started by `mpistrat run`: mpistrat run -n 2 x.py"),
        ("x.py 7", "No such command 'x.py': programs are started by `mpistrat run`: mpistrat run x.py 7"),
        ("-n 2", "No such option"),
    ],
)
def test_habits_of_other_commands(arguments, advice):
    result = invoke(*arguments.split())
    assert result.exit_code == 2
    assert advice in " ".join(result.output.split())


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["run", "-n", "2", "--dry-run", __file__], ["bench", "--help"]]
)
def test_what_is_not_imported(arguments):
    program = f"""
import sys
from mpistrat.cli import main
try:
    main({arguments!r})
except SystemExit as end:
    assert not end.code, end.code
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr


def test_python_m():
    done = subprocess.run(
        [sys.executable, "-m", "mpistrat", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    assert done.stdout == f"mpistrat, version {__version__}\n"


def test_bench_leaves_the_arguments_to_the_subject(monkeypatch):
    seen = []
    subject = types.ModuleType("mpistrat.bench.tune")
    subject.main = lambda arguments: seen.append(arguments) or 4
    monkeypatch.setitem(sys.modules, "mpistrat.bench.tune", subject)
    result = invoke("bench", "tune", "-n", "2", "--json", "out.json", "--help")
    assert seen == [["-n", "2", "--json", "out.json", "--help"]]
    assert result.exit_code == 4


def test_bench_lists_its_subjects():
    result = invoke("bench", "--help")
    for name in SUBJECTS:
        assert name in result.output
    assert invoke("bench", "flight").exit_code == 2


def test_info_alone(run_alone):
    ended = run_alone("-m", "mpistrat", "info").check()
    ended.shows(
        "versions", "mpi4py", "h5py", "MPI", "libmpi", "HDF5", "gzip", "affinity", "BLAS", "/dev/shm", "all-reduce"
    )
    ended.shows("ranks per node", __version__)


def test_info_shows_options_that_were_changed(run_alone):
    environ = {"MPISTRAT_ALL_REDUCE": "ordered"}
    few = run_alone("-m", "mpistrat", "info", **environ).check().output
    every = run_alone("-m", "mpistrat", "info", "--all", **environ).check().output
    assert "ordered (MPISTRAT_ALL_REDUCE)" in few
    assert "(default)" not in few
    assert f"{every.count('(default)')} options: see mpistrat info --all" in few


def test_info_on_several_ranks(run_ranks):
    ended = run_ranks(3, "-m", "mpistrat", "info", "--json").check()
    found = json.loads(ended.output)
    assert found["ranks"]["ranks"] == 3
    assert found["ranks"]["nodes"] * found["ranks"]["ranks per node"] == 3
    assert found["machine"]["OMP_NUM_THREADS"]
    assert found["launcher"]
    assert found["MPI"]["threads"] in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


def test_info_without_mpi(monkeypatch):
    """It is asked for where something is wrong: it says so, and goes on."""
    from mpistrat.process import mpi

    def start():
        raise RuntimeError("cannot load MPI library")

    monkeypatch.setattr(mpi, "start", start)
    result = CliRunner().invoke(info, ["--json"])
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert "cannot load MPI library" in found["MPI"]["library"]
    assert found["HDF5"]
