"""`mpistrat check` under several ranks: clean where all is well, and each planted fault is found."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = ("-m", "mpistrat", "check", "--json")

# What Python runs first in every process: the faults that a user's machine has, and this one has not.
FAULTS = """
import os, sys, time
if "no-library" in os.environ.get("FAULTS", "").split():
    class NoLibrary:
        def find_spec(self, name, path=None, target=None):
            if name == "mpi4py.MPI":
                raise RuntimeError("cannot load MPI library")
    sys.meta_path.insert(0, NoLibrary())
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
faults = os.environ.get("FAULTS", "").split()
if "one-core" in faults and rank is not None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if rank == "1":
    if "hidden-gpu" in faults:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "clock" in faults:
        from mpistrat.cli.check import network
        network.now = lambda: time.time() + 30
    if "library" in faults:
        from mpistrat.cli.check import checks
        describe = checks.describe
        checks.describe = lambda text: {**describe(text), "library": "MPI of another kind 1.0"}
    if "aborts" in faults and "mpistrat.cli.check.child" in sys.orig_argv:
        from mpistrat.cli.check import network
        def abort():
            import signal
            from mpi4py import MPI
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, which may come before the end
            MPI.COMM_WORLD.Abort(3)
        network.now = abort
if "silent" in faults and "mpistrat.cli.check.child" in sys.orig_argv:
    if rank == "1":
        open("here", "w").close()
        time.sleep(1000)
    # The others wait for a message of rank 1 for as long. So they come later, or they might be reported first.
    while not os.path.exists("here"):
        time.sleep(0.1)
    time.sleep(3)
"""


def found(ended, status):
    """The findings, by name, of a check that ended with this status; None: with any but success."""
    text = ended.output[ended.output.find("{") : ended.output.rfind("}") + 1]
    assert ended.status == status if status is not None else ended.status, str(ended)
    return {name: (each["verdict"], each) for name, each in json.loads(text)["checks"].items()}


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """The directory to run in, where faults can be planted by name."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FAULTS)
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    work = tmp_path / "work"
    work.mkdir()
    return work


@pytest.mark.mpich
def test_healthy(run_ranks, faults):
    ended = run_ranks(3, *CHECK, "--data", faults, cwd=faults, OMP_NUM_THREADS="1")
    verdicts = {name: verdict for name, (verdict, _) in found(ended, 0).items()}
    crowded = verdicts.pop("binding")  # there may be fewer cores than ranks
    assert crowded in ("ok", "look")
    assert set(verdicts.values()) == {"ok"}, str(ended)
    assert os.listdir(faults) == []


def test_table(run_alone, faults):
    ended = run_alone("-m", "mpistrat", "check", cwd=faults).check()
    ended.shows("check", "verdict", "what to do", "1 rank, one job", "nothing to fix", "mpistrat check --data DIR")


def test_no_library_on_a_machine_that_has_one(run_alone, faults, tmp_path):
    ended = run_alone(*CHECK, cwd=faults, FAULTS="no-library", CRAY_MPICH_DIR=str(tmp_path))
    verdict, each = found(ended, 1)["library"]
    assert verdict == "fix"
    assert "cannot load MPI library" in each["found"]
    assert 'this machine has Cray MPICH, which mpi4py finds after: MPICC="cc -shared" pip install' in each["advice"]


def in_namespace(folder):
    """A command line that runs the rest with 64 MiB in /dev/shm and ``folder`` read-only, None if it cannot."""
    script = (
        "mount -t tmpfs -o size=64m shm /dev/shm && "
        f"mount -t tmpfs -o ro,size=1m data {shlex.quote(str(folder))} && "
        'exec "$@"'
    )
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    if os.geteuid() or shutil.which("unshare") is None:
        return None
    done = subprocess.run([*command, "true"], capture_output=True, timeout=120, check=False)
    return command if done.returncode == 0 else None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes")
def test_faults_of_nodes(run_ranks, faults, tmp_path, monkeypatch):
    """One core for all, a hidden GPU, a wrong clock, a read-only directory, a small /dev/shm: all at once."""
    data = tmp_path / "data"
    data.mkdir()
    namespace = in_namespace(data)
    if namespace is not None:
        program = tmp_path / "program.py"  # is called with the interpreter and its arguments
        program.write_text("import os, sys\nos.execv(sys.argv[1], sys.argv[1:])\n")
        launcher = [*namespace, sys.executable, "-m", "mpistrat", "run", "-n", "{n}", str(program)]
        monkeypatch.setenv("MPISTRAT_TEST_LAUNCHER", shlex.join(launcher))
    elif os.geteuid():
        data.chmod(0o555)
    else:
        data = Path("/proc")  # not even root makes files there
    ended = run_ranks(
        3,
        *CHECK,
        "--data",
        data,
        cwd=faults,
        FAULTS="one-core hidden-gpu clock",
        CUDA_VISIBLE_DEVICES="0,1",
        SLURM_GPUS_ON_NODE="2",
        HOME=str(faults),
    )
    findings = found(ended, 1)
    assert findings["start"][0] == findings["library"][0] == findings["layout"][0] == "ok", str(ended)
    several = len(os.sched_getaffinity(1)) > 1
    assert findings["binding"][0] == ("fix" if several else "look")
    if several:
        assert "all 3 ranks share core" in findings["binding"][1]["found"]
    assert findings["gpus"][0] == "fix"
    assert "rank 1 sees no GPU (CUDA_VISIBLE_DEVICES=)" in findings["gpus"][1]["found"]
    assert findings["clocks"][0] == "fix"
    assert "rank 1 (" in findings["clocks"][1]["found"]
    # The message that asks rank 1 may take longer than the answer.
    assert re.search(r"(29\.[5-9]|30\.[0-4]) s ahead of rank 0", findings["clocks"][1]["found"])
    assert findings["data"][0] == "fix"
    assert "not writable" in findings["data"][1]["found"]
    if namespace is not None:
        assert "Read-only file system" in findings["data"][1]["found"]
        assert findings["shared_memory"][0] == "fix"
        assert "MB free of 67.1 MB; its ranks need 134 MB" in findings["shared_memory"][1]["found"]


@pytest.mark.full
@pytest.mark.mpich
def test_wrong_mpi_option(faults):
    """Three tasks of srun that are three jobs for MPI: one report, with the option that fits."""
    processes = []
    for rank in range(3):
        environ = {
            **{name: text for name, text in os.environ.items() if not name.startswith(("PMI", "OMPI", "SLURM"))},
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]]),
            "SLURM_JOB_ID": "4",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "n1",
            "SLURM_STEP_NUM_TASKS": "3",
            "SLURM_STEP_TASKS_PER_NODE": "3",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
        }
        command = [sys.executable, *CHECK, "--limit", "30"]
        processes.append(
            subprocess.Popen(command, cwd=faults, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    outputs = [process.communicate(timeout=200)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [1, 1, 1], outputs
    assert outputs[1:] == ["", ""]
    checks = json.loads(outputs[0])["checks"]
    assert checks["start"]["verdict"] == "fix"
    assert "every task of this job is rank 0 of 1" in checks["start"]["found"]
    assert any(f"srun --mpi={plugin}`" in checks["start"]["advice"] for plugin in ("pmix", "pmi2"))
    assert checks["shared_memory"]["verdict"] == "ok"  # what each finds out alone is still told
    assert checks["network"]["verdict"] == "not checked"
    assert os.listdir(faults) == []


def test_mixed_libraries(run_ranks, faults):
    findings = found(run_ranks(3, *CHECK, cwd=faults, FAULTS="library"), 1)
    assert findings["library"][0] == "fix"
    assert "ranks 0, 2: " in findings["library"][1]["found"]
    assert "rank 1: MPI of another kind 1.0" in findings["library"][1]["found"]


@pytest.mark.fault
def test_rank_that_never_comes(run_ranks, faults):
    ended = run_ranks(3, *CHECK, "--limit", "12", cwd=faults, FAULTS="silent")
    findings = found(ended, None)  # where MPI is in disorder, the launcher's status may be another one
    assert findings["start"][0] == "fix"
    assert "rank 1: no progress in 'the start of Python' for 12 s" in findings["start"][1]["found"]


@pytest.mark.fault
def test_rank_that_ends_the_job(run_ranks, faults):
    """MPI of one rank aborts: the launcher kills all, and the report still says which rank it was.

    The launcher leaves the ranks less than a second for that, too little on a busy machine.
    """
    for _ in range(5):
        ended = run_ranks(3, *CHECK, cwd=faults, FAULTS="aborts")
        if "ended in 'clocks'" in ended.output:
            break
    findings = found(ended, None)
    assert findings["start"][0] == "fix"
    assert "rank 1 (" in findings["start"][1]["found"]
    assert "ended in 'clocks'" in findings["start"][1]["found"]
