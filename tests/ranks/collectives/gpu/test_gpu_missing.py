"""GPUs that are not there, or not there for all: what a program is told, on every rank, and what it falls back to."""

import importlib.util
import logging
import re

import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.arrays import device as devices
from mpistrat.cli import info
from mpistrat.cluster_resolver import own_device
from mpistrat.runtime import affinity

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
NO_DEVICE, TOO_OLD, UNKNOWN = (100, "no device"), (35, "insufficient driver"), (999, "unknown error")
CASES = {
    "no GPU": ({"error": NO_DEVICE}, None, r"sees no GPU; fix: ask the scheduler for GPUs.*or use 'cpu'"),
    "hidden": ({"error": NO_DEVICE}, "", r"CUDA_VISIBLE_DEVICES is empty, which hides all: unset it.*or use 'cpu'"),
    "wrong ones named": ({"gpus": []}, "7", r"sees no GPU \(CUDA_VISIBLE_DEVICES=7\); fix: ask the scheduler"),
    "no driver": ({"error": TOO_OLD, "driver": 0}, None, r"no NVIDIA driver \(libcuda.so.1\): run where a GPU is"),
    "driver too old": (
        {"error": TOO_OLD, "driver": 11040},
        None,
        r"too old: it is for CUDA 11\.4, and CuPy for CUDA 12\.9: update the driver, .*or use 'cpu'",
    ),
    "broken": ({"error": UNKNOWN}, None, "does not start: unknown error; fix: see whether nvidia-smi works"),
}


@pytest.fixture
def runtime(cupy, monkeypatch):
    """The stand-in's CUDA; None on a machine with a GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("MPISTRAT_DEVICE", raising=False)
    monkeypatch.setattr(own_device, "_warned", set())
    runtime = cupy.cuda.runtime
    return runtime if hasattr(runtime, "gpus") else None


def break_it(monkeypatch, runtime, case):
    state, visible, text = CASES[case]
    for name, value in state.items():
        monkeypatch.setattr(runtime, name, value)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return text


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_every_rank_is_told_of_the_one_that_lacks_it(runtime, monkeypatch, case, name):
    if runtime is None:
        return
    text = CASES[case][2]
    if RANK == SIZE - 1:
        break_it(monkeypatch, runtime, case)
    with pytest.raises(RuntimeError, match=f"^rank {SIZE - 1}: device {name}.*{text}"):
        mpistrat.MultiWorkerMirroredStrategy(device=name)
    monkeypatch.setenv("MPISTRAT_DEVICE", name)
    with pytest.raises(RuntimeError, match=f"^rank {SIZE - 1}: device {name}"):
        mpistrat.MirroredStrategy()
    if RANK == SIZE - 1:
        with pytest.raises(RuntimeError, match=text):
            mpistrat.OneDeviceStrategy("cuda:0")
        with pytest.raises(RuntimeError, match=text):
            mpistrat.NcclAllReduce()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("everywhere", [False, True])
def test_the_host_if_that_was_asked_for(runtime, monkeypatch, caplog, case, everywhere):
    """With a warning where some ranks see a GPU."""
    if runtime is None:
        return
    if everywhere or RANK == SIZE - 1:
        break_it(monkeypatch, runtime, case)
    with caplog.at_level(logging.WARNING, "mpistrat"):
        strategies = [mpistrat.MultiWorkerMirroredStrategy(device="auto") for _ in range(2)]
    assert {each.extended.worker_devices for each in strategies} == {("cpu:0",)}
    told = [each.getMessage() for each in caplog.records]
    if RANK or everywhere or SIZE == 1:
        assert not told
    else:
        (text,) = told
        assert text.startswith(f"rank {SIZE - 1}: device auto")
        assert text.endswith("so all ranks work on the host, although others see GPUs")


def test_more_ranks_than_gpus(runtime, monkeypatch, caplog):
    """They share them, and are told so once."""
    if runtime is None or SIZE == 1:
        return
    monkeypatch.setattr(runtime, "gpus", ["the only one"])
    with caplog.at_level(logging.WARNING, "mpistrat"):
        for _ in range(2):
            strategy = mpistrat.MultiWorkerMirroredStrategy(device="cuda")
    assert strategy.extended.worker_devices == ("cuda:0",)
    told = [each.getMessage() for each in caplog.records]
    if RANK:
        assert not told
    else:
        (text,) = told
        all_ranks = f"ranks 0-{SIZE - 1}"
        assert text.startswith(f"{all_ranks} share a GPU: the node has {SIZE} ranks, which see 1 in all; NCCL")
    with pytest.raises(RuntimeError, match=r"cuda:1 is not there: this process sees 1 GPU, cuda:0; fix: use one"):
        mpistrat.MultiWorkerMirroredStrategy(device="cuda:1")
    caplog.clear()
    monkeypatch.setattr(runtime, "gpus", [f"GPU {i}" for i in range(SIZE)])
    assert mpistrat.MultiWorkerMirroredStrategy(device="cuda").extended.worker_devices == (f"cuda:{RANK}",)
    assert not caplog.records


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_gpu_of_another_processor(runtime, monkeypatch, caplog, tmp_path, name):
    """The last rank may not use the cores next to its GPU, as with Slurm's block:cyclic."""
    own = affinity.cores()
    if runtime is None or own is None:
        return
    system = tmp_path / str(RANK)
    monkeypatch.setattr(devices, "_SYSTEM", system)
    monkeypatch.setattr(runtime, "gpus", [f"GPU {i}" for i in range(max(2, SIZE))])
    for i in range(len(runtime.gpus)):
        folder = system / runtime.deviceGetPCIBusId(i)
        folder.mkdir(parents=True)
        far = "4096-4099,8000" if RANK == SIZE - 1 else f"{min(own)}-5000"
        (folder / "local_cpulist").write_text(f"{far}\n")
    with caplog.at_level(logging.WARNING, "mpistrat"):
        for _ in range(2):
            mpistrat.MultiWorkerMirroredStrategy(device=name)
    told = [each.getMessage() for each in caplog.records]
    device = f"cuda:{SIZE - 1}" if name == "cuda" else name
    if RANK:
        assert not told
    else:
        (text,) = told
        assert text.startswith(
            f"rank {SIZE - 1} cannot use the cores next to the GPU (rank {SIZE - 1}: {device} is next to cores "
            "4096-4099,8000, and the rank may use "
        )
        assert "--gpu-bind=closest" in text


def test_a_device_that_the_environment_names_wrongly(monkeypatch):
    monkeypatch.setenv("MPISTRAT_DEVICE", "moon")
    with pytest.raises(ValueError, match="MPISTRAT_DEVICE=moon cannot be read: use cpu, cuda, cuda:N or auto"):
        mpistrat.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize("case", CASES)
def test_info(runtime, monkeypatch, case):
    if runtime is None:
        return
    assert "cuda:0 fake" in info._devices()
    text = break_it(monkeypatch, runtime, case)
    assert re.search(text, info._devices())


def test_no_cupy(monkeypatch):
    if importlib.util.find_spec("cupy") is not None:
        return
    with pytest.raises(RuntimeError, match=r"^rank 0: device cuda needs CuPy, which is not installed: pip install"):
        mpistrat.MultiWorkerMirroredStrategy(device="cuda")
    assert mpistrat.MultiWorkerMirroredStrategy(device="auto").extended.worker_devices == ("cpu:0",)
    assert "needs CuPy, which is not installed: pip install" in info._devices()
