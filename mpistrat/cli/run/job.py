"""The plan of a job: the arguments of the launcher, the environment with its reasons, and the machine that decides."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mpistrat.cli.run.mpirun import Launcher
from mpistrat.runtime import affinity

_SHARED_PER_RANK = 16 << 20  # bytes that Open MPI needs in /dev/shm
# Each library has its own variable. OpenBLAS reads OMP_NUM_THREADS only if its own is not set.
_THREADS = (*affinity.THREADS, *(("VECLIB_MAXIMUM_THREADS",) if sys.platform == "darwin" else ()))


class Setting(NamedTuple):
    """A variable of the environment, and the reason why it is set."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Machine:
    """The properties of the machine that decide how a job is started.

    ``cores`` counts those that may be used. ``root`` says whether this user is root, ``terminal`` whether stdout is
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
        return cls(cores(), os.geteuid() == 0, os.isatty(1), shared_memory_free(), reads_other_processes())


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
        why = f"/dev/shm has {machine.shared >> 20} MiB free, {ranks} ranks want {ranks * 16}"
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
    own = affinity.cores()
    count = (os.cpu_count() or 1) if own is None else len(own)
    quota = _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return max(1, count if quota is None else min(count, math.ceil(quota)))


def _quota(groups: Path, root: Path) -> float | None:
    """Return the number of cores that the control group of this process may use, None if it may use all."""
    try:
        own = next(line[3:] for line in groups.read_text().splitlines() if line.startswith("0::"))
        quota, period = (root / own.strip("/") / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, StopIteration, ValueError):
        return None


def shared_memory_free() -> int | None:
    """Return the bytes free in /dev/shm, or None if it does not exist."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def reads_other_processes() -> bool:
    """Return whether processes may copy from each other's memory (Linux; containers can forbid the call)."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        return False
    source, target = ctypes.create_string_buffer(b"x", 1), ctypes.create_string_buffer(1)

    class Piece(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    here = Piece(ctypes.addressof(target), 1)
    there = Piece(ctypes.addressof(source), 1)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    copied: int = call(os.getpid(), ctypes.byref(here), one, ctypes.byref(there), one, none)
    return copied == 1
