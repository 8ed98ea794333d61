"""Names of devices."""

import builtins
import copy
import pickle

import pytest

from mpistrat.runtime.device import Device


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
    [
        "",
        " ",
        "0",
        ":0",
        "cpu:",
        "cpu:-1",
        "cpu:x",
        "cpu:0:1",
        "tpu:0",
        "moon:0",
        "cpu 0",
        "/job:worker",
        "cpu:0\n0",
    ],
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
