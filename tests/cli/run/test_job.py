"""What launchers are told, and the environment that ranks get."""

import os

import pytest

from mpistrat.cli.run import job
from mpistrat.cli.run.job import Launcher, Machine, plan

OPEN_MPI_5 = Launcher("/opt/bin/mpirun", "openmpi", (5, 0, 11))
OPEN_MPI_4 = Launcher("/usr/bin/mpirun", "openmpi", (4, 1, 4))
MPICH = Launcher("/opt/bin/mpirun", "mpich", (5, 0, 2))
INTEL = Launcher("/opt/bin/mpirun", "intel", (2021, 11, 0))
LAUNCHERS = [OPEN_MPI_5, OPEN_MPI_4, MPICH, INTEL]
BIG = Machine(cores=16, shared=1 << 34)


def settings(launcher, ranks=4, where=BIG, environ=None, **options):
    job = plan(launcher, ranks, ["python", "prog.py"], where, environ or {}, **options)
    return {name: value for name, value, _ in job.settings}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_command(launcher):
    job = plan(launcher, 4, ["python", "prog.py", "-n", "7"], BIG, {})
    assert job.command[0] == launcher.path
    assert job.command[job.command.index("-n") + 1] == "4"
    assert job.program == ("python", "prog.py", "-n", "7")
    assert all(reason for _, _, reason in job.settings)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("root", [True, False])
def test_root(launcher, root):
    job = plan(launcher, 4, ["prog"], Machine(cores=4, root=root), {})
    assert ("--allow-run-as-root" in job.command) == (root and launcher.family == "openmpi")


@pytest.mark.parametrize(
    ("launcher", "free", "bound"),
    [
        (OPEN_MPI_5, "none", "core:overload-allowed"),
        (OPEN_MPI_4, "none", "core:overload-allowed"),
        (MPICH, "none", "core"),
    ],
)
def test_binding(launcher, free, bound):
    for bind, expected in ((False, free), (True, bound)):
        command = plan(launcher, 2, ["prog"], BIG, {}, bind=bind).command
        option = "-bind-to" if launcher is MPICH else "--bind-to"
        assert command[command.index(option) + 1] == expected


def test_intel_binds_by_itself_unless_told_not_to():
    assert settings(INTEL)["I_MPI_PIN"] == "off"
    assert "I_MPI_PIN" not in settings(INTEL, bind=True)


@pytest.mark.parametrize(
    ("launcher", "name"), [(OPEN_MPI_5, "OMPI_MCA_mpi_yield_when_idle"), (MPICH, "MPIR_CVAR_POLLS_BEFORE_YIELD")]
)
def test_ranks_yield_where_there_are_more_than_cores(launcher, name):
    assert name not in settings(launcher, ranks=16)
    assert settings(launcher, ranks=17)[name] == "1"


@pytest.mark.parametrize(("ranks", "expected"), [(1, "16"), (3, "5"), (16, "1"), (40, "1")])
def test_threads(ranks, expected):
    found = settings(MPICH, ranks=ranks)
    for library in ("OMP", "OPENBLAS", "MKL", "BLIS", "NUMEXPR"):
        assert found[f"{library}_NUM_THREADS"] == expected


def test_threads_that_the_user_chose():
    found = settings(MPICH, environ={"OMP_NUM_THREADS": "3,2", "MKL_NUM_THREADS": "9"})
    assert found["OPENBLAS_NUM_THREADS"] == "3"  # it would look at OMP_NUM_THREADS, too
    assert "OMP_NUM_THREADS" not in found
    assert "MKL_NUM_THREADS" not in found


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_is_set_stays(launcher):
    found = settings(launcher)
    assert settings(launcher, environ=dict.fromkeys(found, "mine")) == {}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_stays_on_this_machine(launcher):
    expected = {
        OPEN_MPI_5: "PRTE_MCA_ras",
        OPEN_MPI_4: "OMPI_MCA_plm",
        MPICH: "HYDRA_LAUNCHER",
        INTEL: "I_MPI_HYDRA_BOOTSTRAP",
    }
    assert expected[launcher] in settings(launcher)


def test_ranks_of_mpich_listen_on_no_interface_but_the_loopback():
    assert settings(MPICH)["UCX_NET_DEVICES"].startswith("lo")


@pytest.mark.parametrize("launcher", [OPEN_MPI_5, OPEN_MPI_4])
def test_no_second_is_slept_for_a_fabric(launcher):
    assert settings(launcher)["OMPI_MCA_btl"] == "^ofi"
    assert "OMPI_MCA_btl" not in settings(launcher, environ={"OMPI_MCA_btl": "self,sm,tcp"})


def test_little_shared_memory():
    small = Machine(cores=16, shared=50 << 20)
    assert "OMPI_MCA_btl_sm_backing_directory" not in settings(OPEN_MPI_5, ranks=3, where=small)
    assert os.path.isdir(settings(OPEN_MPI_5, ranks=4, where=small)["OMPI_MCA_btl_sm_backing_directory"])
    assert "OMPI_MCA_btl_vader_backing_directory" in settings(OPEN_MPI_4, ranks=4, where=small)


def test_processes_that_may_not_read_each_other():
    closed = Machine(cores=16, reads=False)
    assert settings(OPEN_MPI_5, where=closed)["OMPI_MCA_smsc"] == "^cma"
    assert settings(OPEN_MPI_4, where=closed)["OMPI_MCA_btl_vader_single_copy_mechanism"] == "none"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_output_comes_at_once(launcher):
    assert "PYTHONUNBUFFERED" not in settings(launcher)
    assert settings(launcher, where=Machine(cores=4, terminal=False))["PYTHONUNBUFFERED"] == "1"
    assert settings(launcher, tag=True)["PYTHONUNBUFFERED"] == "1"


def test_cores_are_those_of_the_affinity_mask():
    assert 1 <= job.cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000", None), ("250000 100000", 2.5), ("nonsense", None), (None, None)]
)
def test_quota_of_a_container(tmp_path, text, expected):
    groups = tmp_path / "cgroup"
    groups.write_text("12:cpu:/old\n0::/a/b\n")
    if text is not None:
        (tmp_path / "root/a/b").mkdir(parents=True)
        (tmp_path / "root/a/b/cpu.max").write_text(text + "\n")
    assert job._quota(groups, tmp_path / "root") == expected
    assert job._quota(tmp_path / "missing", tmp_path) is None


def test_reading_other_processes_is_probed():
    assert job.reads_other_processes() in (True, False)
