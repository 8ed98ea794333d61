"""Names of devices."""

import builtins
import copy
import pickle
import sys
import types

import pytest

from mpistrat.arrays.device import Device, any_gpu, seen_gpus


@pytest.mark.parametrize(
    ("name", "kind", "index"),
    [
        ("cpu", "cpu", 0),
        ("CPU", "cpu", 0),
        ("cpu:0", "cpu", 0),
        ("/cpu:0", "cpu", 0),
        ("/device:CPU:0", "cpu", 0),
        ("gpu:1", "cuda", 1),
        ("/gpu:0", "cuda", 0),
        ("GPU:12", "cuda", 12),
        ("cuda:1", "cuda", 1),
        ("cuda", "cuda", 0),
        ("/device:GPU:2", "cuda", 2),
        ("device:gpu:2", "cuda", 2),
        ("/job:worker/replica:0/task:3/device:GPU:1", "cuda", 1),
        ("/job:worker/task:3/cpu:0", "cpu", 0),
        ("/gpu:*", "cuda", 0),
        (" cpu:0 ", "cpu", 0),
    ],
)
def test_names(name, kind, index):
    device = Device.parse(name)
    assert device == Device(kind, index)
    assert Device.parse(str(device)) == device
    assert Device.parse(device) is device


@pytest.mark.parametrize(
    "name",
    ["", " ", "0", ":0", "cpu:", "cpu:-1", "cpu:x", "cpu:0:1", "tpu:0", "moon:0", "cpu 0", "/job:worker", "cpu:0\n0"],
)
def test_no_names(name):
    with pytest.raises(ValueError, match="names no device"):
        Device.parse(name)


@pytest.mark.parametrize("name", [None, 0, b"cpu:0", ["cpu:0"], ("cpu", 0)])
def test_no_strings(name):
    with pytest.raises(TypeError):
        Device.parse(name)


def test_text_and_identity():
    assert str(Device("cuda", 3)) == "cuda:3"
    assert f"{Device('cpu')}" == "cpu:0"
    assert len({Device("cpu"), Device("cpu", 0), Device("cuda")}) == 2
    for again in (copy.deepcopy(Device("cuda", 1)), pickle.loads(pickle.dumps(Device("cuda", 1)))):
        assert again == Device("cuda", 1)


def test_cpu_is_always_there():
    assert Device("cpu", 7).require() == Device("cpu", 7)


def test_gpu_without_cupy(monkeypatch):
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.partition(".")[0] == "cupy":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RuntimeError, match=r"cuda:0 needs CuPy.*pip install"):
        Device("cuda").require()


class CudaError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"cudaError {status}")
        self.status = status


def with_gpus(monkeypatch, count, driver=12090):
    """A CuPy that sees so many GPUs, or that CUDA answers with an error."""

    def get_device_count():
        if isinstance(count, CudaError):
            raise count
        return count

    runtime = types.SimpleNamespace(
        CUDARuntimeError=CudaError,
        getDeviceCount=get_device_count,
        getDeviceProperties=lambda device: {"uuid": bytes([device + 1] * 2)} if device < 2 else {},
        deviceGetPCIBusId=lambda device: f"0000:{device:02x}:00.0",
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: 12090,
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime)))


@pytest.mark.parametrize(
    ("count", "driver", "visible", "text"),
    [
        (CudaError(35), 0, None, "this machine has no NVIDIA driver"),
        (CudaError(35), 11040, None, r"too old: it is for CUDA 11\.4, and CuPy for CUDA 12\.9.*CuPy for CUDA 11"),
        (CudaError(100), 12090, None, r"sees no GPU; fix: ask the scheduler for GPUs.*or use 'cpu'$"),
        (CudaError(100), 12090, "", "sees no GPU.*CUDA_VISIBLE_DEVICES is empty"),
        (0, 12090, "-1", r"sees no GPU \(CUDA_VISIBLE_DEVICES=-1\); fix: ask"),
        (CudaError(999), 12090, None, "CUDA does not start: cudaError 999; fix: see whether nvidia-smi works"),
        (
            2,
            12090,
            "4,5",
            r"cuda:2 is not there: this process sees 2 GPUs, cuda:0 to cuda:1 .*=4,5\); fix: use one of these",
        ),
    ],
)
def test_gpus_that_are_not_there(monkeypatch, count, driver, visible, text):
    with_gpus(monkeypatch, count, driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(RuntimeError, match=text):
        Device("cuda", 2).require()


def test_a_cupy_that_cannot_be_imported(monkeypatch):
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "cupy":
            raise ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RuntimeError, match="cannot be imported: No module named 'fastrlock'; fix: install one CuPy"):
        Device("cuda").require()


def test_a_cupy_without_a_compiler(monkeypatch):
    """Its wheels bring none: that is said where the device is asked for, and not where the first sum is made."""

    def get_version():
        raise OSError("libnvrtc.so.12: cannot open shared object file")

    with_gpus(monkeypatch, 1)
    monkeypatch.setattr(sys.modules["cupy"].cuda, "nvrtc", types.SimpleNamespace(getVersion=get_version), raising=False)
    with pytest.raises(RuntimeError, match=r"device cuda:0: .*NVRTC.*\[ctk\].*libnvrtc\.so\.12"):
        Device("cuda").require()


def test_names_of_any_gpu():
    assert [any_gpu(name) for name in ("cuda", "GPU", "/gpu:*", " gpu ")] == [True] * 4
    assert [any_gpu(name) for name in ("cuda:0", "/gpu:1", "cpu", "cpu:0", Device("cuda"))] == [False] * 5
    for name, error in {"moon": ValueError, 3: TypeError}.items():
        with pytest.raises(error):
            any_gpu(name)


def test_gpus_are_told_apart(monkeypatch):
    """Slices of one GPU have its address, and GPUs of AMD no UUID."""
    with_gpus(monkeypatch, 3)
    names = seen_gpus("device cuda")
    assert len(set(names)) == 3
    assert names[0] == "0101 0000:00:00.0"
    assert names[2] == " 0000:02:00.0"
    with_gpus(monkeypatch, CudaError(35), driver=0)
    with pytest.raises(RuntimeError, match="device cuda: CuPy is installed, but"):
        seen_gpus("device cuda")
