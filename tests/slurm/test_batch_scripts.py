"""The scripts of ``slurm/`` on a real Slurm, with the MPI that is beside this Python."""

import itertools
import json
import os

import pytest
from jobs import EXAMPLES, SCRIPTS, lines, run_here

pytestmark = [pytest.mark.timeout(900), pytest.mark.mpich]

EPOCHS = 3
DIGITS = ["--epochs", str(EPOCHS), "--dtype", "float64"]

# The main job; then each rank says where it is, by Slurm's variables and by MPI.
WHERE = f"""
import json, os, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import mpistrat
from mpistrat import cluster_resolver
if len(sys.argv) > 1:
    import train_digits
    train_digits.train(train_digits.parse())
comm = mpistrat.MultiWorkerMirroredStrategy().comm
resolver = cluster_resolver.resolve()
place = resolver.placement
line = json.dumps({{
    "rank": comm.rank, "size": comm.size, "host": os.uname().nodename, "resolver": type(resolver).__name__,
    "said": [place.rank, place.size, place.local_rank], "nodes": place.nodes, "ranks_per_node": place.ranks_per_node,
    "gpu": place.gpu, "visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "threads": os.environ["OMP_NUM_THREADS"],
}})
os.write(1, f"{{line}}\\n".encode())  # in one piece, unlike print
"""


@pytest.fixture(scope="module", autouse=True)
def while_these_run(request):
    """Jobs of other tests, if they are selected, wait in the queue for longer than these tests take."""
    used = {name for item in request.session.items for name in item.fixturenames}
    for name in ("limited", "signalled", "farm"):
        if name in used:
            request.getfixturevalue(name)


@pytest.fixture(scope="module")
def losses(tmp_path_factory, digits):
    """The losses of the main example on one rank."""
    out = tmp_path_factory.mktemp("alone")
    run_here(EXAMPLES / "train_digits.py", *DIGITS, "--data-dir", digits, "--out", out)
    return json.loads((out / "history.json").read_text())["loss"]


@pytest.fixture
def where(tmp_path):
    program = tmp_path / "where.py"
    program.write_text(WHERE)
    return program


def check_places(found, ranks_per_node):
    """Nodes have so many ranks, one node after another, and the resolver says what MPI says.

    Which nodes they are is Slurm's choice: where one of them is busy, it takes another.
    """
    hosts = [each["host"] for each in found]
    assert [len(list(ranks)) for _, ranks in itertools.groupby(hosts)] == ranks_per_node
    assert len(set(hosts)) == len(ranks_per_node)
    for rank, each in enumerate(found):
        assert (each["rank"], each["size"]) == (rank, len(found))
        assert each["said"] == [rank, len(found), hosts[:rank].count(hosts[rank])]


def check_losses(out, losses, replicas):
    history = json.loads((out / "history.json").read_text())
    assert history["replicas"] == replicas
    assert history["loss"] == pytest.approx(losses, rel=1e-9)


def test_main_job_on_nodes_with_three_one_and_one_rank(run_job, plugin, where, losses, tmp_path):
    script = SCRIPTS / ("cpu.sbatch" if plugin == "pmix" else "mpich.sbatch")
    nodes = ["node0", "node0", "node0", "node1", "node2"]
    (tmp_path / "hosts").write_text("\n".join(nodes) + "\n")
    wanted = ["--nodes=3", "--ntasks=5", "--distribution=arbitrary"]
    output = run_job(*wanted, script, where, *DIGITS, "--out", "out", SLURM_HOSTFILE=str(tmp_path / "hosts"))
    check_places(lines(output), [3, 1, 1])
    assert [each["host"] for each in lines(output)] == nodes
    assert {each["resolver"] for each in lines(output)} == {"SlurmClusterResolver"}
    check_losses(tmp_path / "out", losses, 5)


def test_mpirun_inside_sbatch(run_job, where, losses, digits, tmp_path):
    wanted = ["--nodes=3", "--ntasks=5", "--ntasks-per-node=3"]
    script = SCRIPTS / "cpu-mpirun.sbatch"
    output = run_job(*wanted, script, where, *DIGITS, "--data-dir", digits, "--out", "out")
    found = lines(output)
    hosts = [each["host"] for each in found]
    check_places(found, [hosts.count(host) for host in dict.fromkeys(hosts)])
    assert {each["resolver"] for each in found} == {"MpiClusterResolver"}
    check_losses(tmp_path / "out", losses, 5)


def test_array(run_job, tmp_path, losses, digits):
    seeds = ["--seed", "%a", "--out", "out-%A-%a", "--data-dir", digits]
    program = EXAMPLES / "train_digits.py"
    run_job("--array=0-1", "--ntasks=2", SCRIPTS / "array.sbatch", program, *DIGITS, *seeds)
    # Before these two, an array that Slurm kept from its end may have left others.
    numbered = {tuple(map(int, out.name.split("-")[1:])): out for out in tmp_path.glob("out-*")}
    (first, second), (number, _) = [out for _, out in sorted(numbered.items())[-2:]], max(numbered)
    assert [first.name, second.name] == [f"out-{number}-0", f"out-{number}-1"]
    check_losses(first, losses, 2)
    assert json.loads((second / "history.json").read_text())["loss"] != pytest.approx(losses, rel=1e-3)


def test_heterogeneous_job(run_job, where, losses, digits, tmp_path):
    output = run_job(SCRIPTS / "hetjob.sbatch", where, *DIGITS, "--data-dir", digits, "--out", "out")
    check_places(lines(output), [1, 4, 4])
    assert [each["threads"] for each in lines(output)] == ["4", *["1"] * 8]
    check_losses(tmp_path / "out", losses, 9)


def test_one_rank_per_gpu(run_job, where):
    output = run_job("--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=2", SCRIPTS / "gpu.sbatch", where)
    found = lines(output)
    check_places(found, [2, 2])
    assert [(each["visible"], each["gpu"]) for each in found] == [("0,1", "0"), ("0,1", "1")] * 2
    assert {each["threads"] for each in found} == {"2"}


def test_container(run_job, where, tmp_path):
    """With a stand-in for Apptainer that understands the options of the script, and has no image."""
    apptainer = tmp_path / "bin" / "apptainer"
    apptainer.parent.mkdir()
    apptainer.write_text(
        '#!/bin/bash\n[ "$1 $2 $3 $4 $5 $6" = "exec --bind $PWD --pwd $PWD $PWD/mpistrat.sif" ] || exit 9\n'
        'shift 6\nexec "$@"\n'
    )
    apptainer.chmod(0o755)
    path = f"{apptainer.parent}:{os.environ['PATH']}"
    output = run_job("--ntasks-per-node=2", SCRIPTS / "container.sbatch", where, PATH=path)
    check_places(lines(output), [2, 2])


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.sbatch")))
def test_slurm_takes_each_script(cluster, script):
    fits = ["--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=4"] if script == "gpu.sbatch" else []
    ended = cluster.run("sbatch", "--test-only", *fits, SCRIPTS / script)
    assert ended.returncode == 0, ended.stdout
    assert " to start at " in ended.stdout


def test_written_script(run_job, plugin, where, tmp_path):
    """It finds the --mpi of the library by itself, and hands on arguments as they are."""
    odd = ["it's", "a  $HOME", "*", "--seed=%a"]
    where.write_text(WHERE.replace("if len(sys.argv) > 1", f"assert sys.argv[1:] == {odd!r}\nif False"))
    command = ["-m", "mpistrat", "slurm", "write", "--nodes", "3", "--ntasks", "5", "--out", tmp_path / "my.sbatch"]
    run_here(*command, where, *odd)
    assert f"MPISTRAT_SRUN_MPI:-{plugin}}}" in (tmp_path / "my.sbatch").read_text()
    output = run_job(tmp_path / "my.sbatch", PYTHON="", MPISTRAT_SRUN_MPI="")
    check_places(lines(output), [3, 1, 1])
    assert lines(output)[0]["ranks_per_node"] == [3, 1, 1]


@pytest.mark.parametrize("wrong", ["none", "pmi2 or pmix"])
def test_wrong_mpi_is_a_clear_error(submit, plugin, where, wrong):
    """Not five programs that each believe to be alone. MPICH itself would refuse PMIx, without a remedy."""
    if wrong != "none":
        wrong = {"pmix": "pmi2", "pmi2": "pmix"}[plugin]
    job = submit("--ntasks-per-node=2", SCRIPTS / "cpu.sbatch", where, MPISTRAT_SRUN_MPI=wrong)
    output = job.ended("FAILED")
    assert lines(output) == []
    assert "every task of this job is rank 0 of 1: the launcher started 4 tasks" in output
    assert f"Start it with `srun --mpi={plugin}`" in output
