"""Commands and the main job with arrays on GPUs: a real one where MPISTRAT_TEST_GPU is set, else the stand-in's."""

import json
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "communication" / "allreduce_gpu.py"
REAL = bool(os.environ.get("MPISTRAT_TEST_GPU"))


@pytest.fixture(autouse=True)
def gpus(monkeypatch, tmp_path):
    """CuPy for the programs that a test starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if not REAL:
        if not (shutil.which("g++") or shutil.which("clang++")):
            pytest.skip("the kernels of the stand-in need a C++ compiler")
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "fakes"))


def test_bench_allreduce(run_ranks, tmp_path):
    rows = tmp_path / "rows.json"
    arguments = ["--sizes", "100B,1MiB", "--repetitions", "1", "--seconds", "0.1"]
    arguments += ["--algorithm", "pinned", "--json", rows]
    ended = run_ranks(2, PROGRAM, *arguments, limit=100).check()
    ended.shows("GB/s", "route pinned: possible", "route gpu_direct: Alltoall on the memory of GPUs was not tried")
    ways = {(row["case"], row["way"]) for row in json.loads(rows.read_text())}
    assert ways == {
        *(("array on a GPU", way) for way in ("mpistrat", "mpistrat, pinned", "unpinned copy and one call")),
        *(("bound", way) for way in ("down and up again, pinned", "a copy on the GPU")),
        ("bound", "memory read and written, as the GPU says"),
        *(way for way in ways if "PCIe" in way[1]),
    }
    assert "% of the bound: down and up again, pinned" in ended.output
    refused = run_ranks(2, PROGRAM, *arguments, "--algorithm", "gpu_direct")
    assert refused.status == 1
    refused.shows("cannot be reduced by 'gpu_direct': Alltoall")


def test_info(run_ranks):
    run_ranks(2, "-m", "mpistrat", "info").check().shows("arrays on GPUs", "not gpu_direct: Alltoall", "memory ")


@pytest.mark.skipif(REAL, reason="whether this MPI library is CUDA-aware is not known")
def test_check(run_alone, run_ranks):
    operations = ("Alltoall", "Allgather", "Allgatherv", "Bcast")
    run_alone("-m", "mpistrat", "check", "--gpu-direct").check().shows(
        *(f"{each} on the memory of GPUs works" for each in operations)
    )
    ended = run_ranks(2, "-m", "mpistrat", "info").check()
    ended.shows(" ".join(operations))
    assert "not gpu_direct" not in ended.output, str(ended)


@pytest.mark.full
def test_a_probe_that_hangs(run_alone):
    """Under srun nothing else ends it."""
    hangs = "from mpistrat.cli.check import gpu_probe as p; import time; p._main = lambda: time.sleep(60)"
    ended = run_alone("-c", f"{hangs}; p.main(0.5)", limit=50)
    assert ended.status == 1
    ended.shows("the probe did not end within 0.5 s")


def test_memory_does_not_grow(run_ranks):
    """A few times only: the 10,000 are for a machine with a GPU."""
    ended = run_ranks(2, ROOT / "tests" / "gpu" / "growth.py", "--times", "30", limit=100).check()
    ended.shows("pinned, 30 times, rank 1: ", "gpu_direct: Alltoall")


def test_bandwidth_of_kernels(run_ranks):
    program = ROOT / "tests" / "gpu" / "bandwidth.py"
    ended = run_ranks(1, program, "--megabytes", "1", "--repetitions", "1", limit=100).check()
    ended.shows("a copy on the GPU", "pack 1000 arrays of bfloat16", "update by mpistrat_adam of float64")


@pytest.mark.timeout(200)
def test_the_main_job(run_ranks, tmp_path):
    """The losses are those of the host, within the roundings of another order."""
    losses = {}
    program = ROOT / "docs" / "examples" / "train_digits.py"
    for device in ("cpu", "cuda"):
        options = (
            "--dtype=float64",
            "--epochs=1",
            "--batch-size=256",
            "--data-dir",
            tmp_path / "data",
            "--out",
            tmp_path / device,
        )
        run_ranks(2, program, *options, "--device", device, limit=90).check()
        losses[device] = json.loads((tmp_path / device / "history.json").read_text())["loss"]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-6)
