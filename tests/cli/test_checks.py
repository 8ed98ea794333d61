"""The verdicts of `mpistrat check`, from what the ranks told."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.cli.check import checks, network
from mpistrat.cli.check.checks import CHECKS
from mpistrat.cli.check.job import START, Blame, CheckedJob, CheckOptions, Severity, Trouble, rounds

OK, LOOK, FIX, UNKNOWN = Severity
GIB, MIB = 2**30, 2**20


def job(check, *facts, nodes=None, **more):
    """A job of which each rank told these facts; by default all ranks are on one node."""
    nodes = nodes or [0] * len(facts)
    told = {
        rank: {"host": f"n{node}", "node": node, check: each}
        for rank, (each, node) in enumerate(zip(facts, nodes, strict=True))
    }
    return CheckedJob(len(facts), told, **more)


JUDGE = {check.name: check.judge for check in CHECKS}


def judged(name, *facts, **more):
    finding = JUDGE[name](job(name, *facts, **more))
    assert finding.advice or finding.severity in (OK, UNKNOWN)
    return finding


def test_every_check_copes_with_knowing_nothing():
    nothing = CheckedJob(2, {0: {"host": "n0"}, 1: {"host": "n1"}})
    for check in CHECKS:
        assert check.judge(nothing).severity in (UNKNOWN, OK)


def bound(cores, there=8, threads=1):
    return {"cores": cores, "there": there, "threads": threads}


@pytest.mark.parametrize(
    ("facts", "nodes", "verdict", "text"),
    [
        ([bound([0]), bound([1])], None, OK, "1 core for rank 0, threads: 1"),
        ([bound([3]), bound([3])], None, FIX, "n0: all 2 ranks share core 3 of 8"),
        ([bound([3]), bound([3])], [0, 1], OK, "1 core"),
        ([bound([0]), bound([1]), bound([5]), bound([5])], [0, 0, 1, 1], FIX, "n1: all 2 ranks share core 5"),
        ([bound([0], 1), bound([0], 1)], None, LOOK, "2 ranks on 1 of 1 cores"),
        ([bound([0, 1], threads=None)] * 2, None, LOOK, "2 ranks start up to 4 threads on 2 cores"),
        ([bound([0, 1], threads=4), bound([2, 3], threads=4)], None, LOOK, "up to 8 threads on 4 cores"),
        ([bound([0, 1], threads=None)], None, OK, "threads: one per core"),
    ],
)
def test_binding(facts, nodes, verdict, text):
    finding = judged("binding", *facts, nodes=nodes)
    assert (finding.severity, text in finding.text) == (verdict, True), finding


def gpu(seen, given=None, own=None, there=0):
    variable = "" if seen is None else f"CUDA_VISIBLE_DEVICES={','.join(seen)}"
    return {"seen": seen, "variable": variable, "own": own, "given": given, "there": there}


@pytest.mark.parametrize(
    ("facts", "nodes", "verdict", "text"),
    [
        ([gpu(None)] * 2, None, OK, "none"),
        ([gpu([], there=4)], None, LOOK, "no rank sees any of the 4"),
        ([gpu(None, there=4)], None, OK, "4 on a node, all visible"),
        ([gpu(["0", "1"], 2, "0"), gpu(["0", "1"], 2, "1")], None, OK, "2 visible"),
        ([gpu(["0"], 2, "0"), gpu(["1"], 2, "1")], None, OK, "1 visible"),
        ([gpu(["0", "1"], 2, "0"), gpu([], 2)], None, FIX, "n0: rank 1 sees no GPU (CUDA_VISIBLE_DEVICES=), although"),
        ([gpu(["0"]), gpu([])], [0, 1], FIX, "n1: rank 1 sees no GPU"),
        ([gpu(None, 2)] * 2, None, FIX, "although the job has 2 there"),
        ([gpu(["0"], 2, "0")], None, FIX, "its ranks see GPU 0 of 2 that the job has there"),
        ([gpu(["0"], 4, "0")] * 4, None, UNKNOWN, "n0: each rank sees GPU 0, of 4 that the job has there"),
        ([gpu(["1"], 4, "1")] * 4, None, FIX, "its ranks see GPU 1 of 4"),
        ([gpu(["0"], 1, "0")] * 3, None, LOOK, "ranks 0-2 share GPU 0"),
        ([gpu(["MIG-a", "MIG-b"], None, "MIG-a")], None, FIX, "several MIG slices"),
        ([gpu(["MIG-a"], None, "MIG-a")], None, OK, "1 visible"),
    ],
)
def test_gpus(facts, nodes, verdict, text):
    finding = judged("gpus", *facts, nodes=nodes)
    assert (finding.severity, text in finding.text) == (verdict, True), finding


@pytest.mark.parametrize(
    ("seen", "of_task", "names"), [("0", "3", ["3"]), ("0,1", "2,3", ["2", "3"]), ("0", "0,1", ["0"])]
)
def test_gpus_that_cgroups_number_from_0(seen, of_task, names, monkeypatch):
    for name in [each for each in os.environ if each.startswith(("SLURM", "OMPI_", "PMI"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    monkeypatch.setenv("SLURM_STEP_GPUS", of_task)
    facts = checks.look_at_gpus(None)
    assert (facts["seen"], facts["own"]) == (names, names[0])
    assert judged("gpus", *({**facts, "seen": [n], "own": n, "given": 2} for n in "01")).severity is OK


def shm(free, total=16 * GIB):
    return {"free": free, "total": total}


@pytest.mark.parametrize(
    ("facts", "nodes", "verdict", "text"),
    [
        ([shm(16 * GIB)], None, OK, "17.2 GB free"),
        ([shm(64 * MIB, 64 * MIB)], None, FIX, "67.1 MB free of 67.1 MB; its ranks need 134 MB"),
        ([shm(16 * GIB), shm(100 * MIB)], [0, 1], FIX, "n1: 105 MB free"),
        ([shm(1 * GIB)] * 64, None, FIX, "need 2.15 GB"),
    ],
)
def test_shared_memory(facts, nodes, verdict, text):
    finding = judged("shared_memory", *facts, nodes=nodes)
    assert (finding.severity, text in finding.text) == (verdict, True), finding
    if verdict is FIX:
        assert ("--shm-size" in finding.advice) == (facts[-1]["total"] == 64 * MIB)


def loaded(name="Open MPI v5.0.11", **more):
    same = dict.fromkeys(("python", "mpistrat", "mpi4py", "numpy", "h5py"), "1")
    return {**same, "family": "openmpi", "library": name, "file": "/l.so", "threads": "MULTIPLE", **more}


@pytest.mark.parametrize(
    ("facts", "verdict", "text"),
    [
        ([loaded()] * 2, OK, "Open MPI v5.0.11, /l.so, threads MULTIPLE"),
        ([loaded(), loaded("MPICH 5")], FIX, "rank 0: Open MPI v5.0.11 (/l.so)\nrank 1: MPICH 5 (/l.so)"),
        ([loaded(), loaded("Open MPI v4.1.2")], FIX, "rank 1: Open MPI v4.1.2"),
        ([loaded(), loaded(numpy="2")], FIX, "numpy: rank 0: 1\nrank 1: 2"),
        (
            [loaded(), {**loaded(), "error": "cannot load MPI library", "remedy": "load the module"}],
            FIX,
            "rank 1 (n0) cannot load an MPI library: cannot",
        ),
        ([loaded(), loaded(threads="FUNNELED")], LOOK, "threads FUNNELED"),
        ([loaded(foreign="remove it")] * 2, LOOK, "Open MPI v5.0.11, /l.so"),
    ],
)
def test_library(facts, verdict, text):
    finding = judged("library", *facts)
    assert (finding.severity, text in finding.text) == (verdict, True), finding


def folder(**more):
    return {"folder": "/d", "files": "lustre", "free": 5 * GIB, **more}


@pytest.mark.parametrize(
    ("facts", "exchanged", "verdict", "text"),
    [
        ([folder()], {"data": []}, OK, "/d (lustre): writable, locks work, 5.37 GB free"),
        ([folder(), None, folder(missing=True)], {}, FIX, "/d on n0 (lustre): there is no such directory"),
        ([folder(unwritable="Read-only file system")], {}, FIX, "not writable: Read-only file system"),
        ([folder(lock="unable to lock file, errno = 524")], {}, FIX, "HDF5 cannot lock files: unable"),
        ([folder(), None], {"data": [1]}, FIX, "not seen on n0"),
        ([folder(free=5 * MIB)], {"data": []}, LOOK, "5.24 MB free"),
    ],
)
def test_data(facts, exchanged, verdict, text):
    finding = judged("data", *facts, exchanged=exchanged, options=CheckOptions("/d"))
    assert (finding.severity, text in finding.text) == (verdict, True), finding


@pytest.mark.parametrize(
    ("found", "verdict", "text"),
    [
        ([], OK, "one rank"),
        ([[1, 0.001, 0.0005], [2, -0.002, 0.001]], OK, "within 3.0 ms"),
        ([[1, 5.0, 6.0]], OK, "within"),  # cannot be told: the messages took that long
        ([[1, 0.3, 0.001]], LOOK, "rank 1 (n0) is 0.3 s ahead of rank 0"),
        ([[1, 0.3, 0.001], [2, -61.0, 0.01]], FIX, "rank 2 (n0) is 61.0 s behind rank 0"),
    ],
)
def test_clocks(found, verdict, text):
    finding = judged("clocks", None, None, None, exchanged={"clocks": found})
    assert (finding.severity, text in finding.text) == (verdict, True), finding


@pytest.mark.parametrize(
    ("pairs", "verdict", "texts"),
    [
        ([], OK, ["one node"]),
        ([[0, 1, 1e-5, 1e9]], OK, ["worst bandwidth 1.0 GB/s (n0-n1); worst latency 10 us (n0-n1)"]),
        ([[0, 1, 1e-5, 1e6, True]], FIX, ["1 MB/s (n0-n1)"]),
        (
            [[0, 1, 1e-5, 1e9], [0, 2, 2e-5, 1e8, True], [1, 2, 1e-5, 1.1e8, True]],
            FIX,
            ["worst bandwidth 100 MB/s (n0-n2), usual 1.0 GB/s", "n2 is in all slow pairs"],
        ),
        ([[0, 1, 1e-5, 1e9], [0, 2, 2e-5, 3e8], [1, 2, 1e-5, 1e9]], OK, ["worst bandwidth 300 MB/s (n0-n2)"]),
        ([[0, 1, 2e-3, 1e9]], LOOK, ["2000 us"]),
        # Slow when it was measured together with others, and not a second time.
        ([[0, 1, 1e-5, 1e9], [0, 2, 2e-5, 9e8, True], [1, 2, 1e-5, 1e9]], OK, ["worst bandwidth 900 MB/s"]),
    ],
)
def test_network(pairs, verdict, texts):
    finding = judged("network", None, None, None, nodes=[0, 1, 2], exchanged={"network": pairs})
    assert finding.severity is verdict
    for text in texts:
        assert text in finding.text + finding.advice


def test_nodes_on_one_switch_make_no_slow_pairs_of_the_others():
    """A healthy cluster of 24 nodes, four on a switch: within a switch they are six times as fast."""
    pairs = [
        network.Pair(a, b, 1e-5, 25e9 if a // 4 == b // 4 else 4e9)
        for one_round in rounds(range(24), 16)
        for a, b in one_round
    ]
    assert network._slow(pairs) == []
    bad = [pair._replace(rate=0.5e9) if 7 in pair[:2] else pair for pair in pairs]
    assert {frozenset(pair[:2]) for pair in network._slow(bad)} == {
        frozenset(pair[:2]) for pair in pairs if 7 in pair[:2]
    }


def test_layout():
    finding = judged("layout", None, None, None, nodes=[0, 0, 1], exchanged={"layout": None})
    assert (finding.severity, finding.text) == (OK, "2 nodes, ranks: 2, 1")
    finding = judged("layout", None, None, exchanged={"layout": [1, "size is 3 ...", "another launch"]})
    assert (finding.severity, finding.advice) == (FIX, "another launch")


def test_start():
    assert judged("start", None, None).text == "2 ranks, one job"
    stands = Trouble(Blame.STUCK, "no progress in 'x' for 9 s", "x")
    troubles = {0: stands, 1: Trouble(Blame.UNHEARD, "sent no report"), 2: stands}
    finding = judged("start", None, None, None, troubles=troubles)
    assert finding.severity is FIX
    assert finding.text == "rank 1 (n0): sent no report\nranks 0, 2 (n0): no progress in 'x' for 9 s"
    aborted = {
        rank: Trouble(Blame.ENDED, f"ended in 'the start of MPI' (status 16): Abort({rank})", START)
        for rank in range(3)
    }
    told = [{**loaded(), "family": "mpich", "srun": True}] * 3
    finding = JUDGE["start"](job("library", *told, troubles=aborted))
    assert finding.text.startswith("ranks 0-2 (n0): ended in 'the start of MPI'")
    assert "srun --mpi=pmi2" in finding.advice


@given(st.integers(1, 24), st.integers(1, 30))
@settings(derandomize=True, database=None, deadline=None)
def test_rounds(nodes, most):
    """Each is in one pair at a time, and with rounds enough every pair meets once."""
    found = rounds(list(range(nodes)), most)
    assert len(found) <= most
    for pairs in found:
        players = [player for pair in pairs for player in pair]
        assert len(players) == len(set(players))
    met = [pair for pairs in found for pair in pairs]
    assert len(met) == len(set(met))
    if most >= nodes:
        assert len(met) == nodes * (nodes - 1) // 2


def test_hosts(run_ranks, tmp_path):
    """The other command that shows where ranks are."""
    ended = run_ranks(3, "-m", "mpistrat", "hosts", cwd=tmp_path, CUDA_VISIBLE_DEVICES="7,8,9").check()
    ended.shows("fact", "variable it came from", "what MPI says", "SIZE", "the ranks, as MPI numbers them")
    ended.shows("7 8 9", "cuda:2", "CUDA_VISIBLE_DEVICES, the local rank")


WRONG = """
import os
from mpistrat.cli import main
from mpistrat.process import mpi

rank = mpi.start().COMM_WORLD.rank
for size in {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"} & set(os.environ) if rank == 1 else ():
    os.environ[size] = "3"
main(["hosts"])
"""


def test_hosts_shows_what_is_wrong_on_another_rank(run_ranks, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    ended = run_ranks(2, tmp_path / "wrong.py", cwd=tmp_path)
    assert ended.status == 1
    ended.shows("the ranks, as MPI numbers them", "rank 1: size is 3 according to")


@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.full), ["--no-mpi"]])
def test_hosts_of_singletons(options, tmp_path):
    step = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "n[7-8]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "0",
    }
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("PMI", "OMPI", "SLURM"))}
    done = subprocess.run(
        [sys.executable, "-m", "mpistrat", "hosts", *options],
        env={**environ, **step},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == (0 if options else 1), done.stderr
    assert "n7 n8" in done.stdout
    assert "SLURM_STEP_NODELIST" in done.stdout
    assert ("every task of this job is rank 0 of 1" in done.stdout) == (not options)
