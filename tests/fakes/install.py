"""Puts the stand-in for CuPy in its place for one test."""

import functools
import importlib
import shutil
import sys
from pathlib import Path

import pytest

from mpistrat.arrays import arrays
from mpistrat.arrays.gpu import kernels, pinned
from mpistrat.arrays.gpu import pinned as device_feed
from mpistrat.collectives.gpu import pointers as gpu_pointers
from mpistrat.process.cache import Cache


def stand_in(monkeypatch):
    """What stands in for CuPy on a machine without a GPU, as if the program had just begun."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("the kernels of the stand-in need a C++ compiler")
    for name, module in fake_cupy().items():
        monkeypatch.setitem(sys.modules, name, module)
    cupy = sys.modules["cupy"]
    monkeypatch.setattr(arrays, "_cupy", lambda: cupy)
    for module in (pinned, device_feed, gpu_pointers):
        monkeypatch.setattr(module, "_idle", {})
    monkeypatch.setattr(kernels, "_tables", Cache(256))
    cuda = cupy.cuda
    for name, value in {"gpus": list(cuda.runtime.own), "driver": 12090, "error": None}.items():
        monkeypatch.setattr(cuda.runtime, name, value)
    monkeypatch.setattr(cuda, "order", "late")
    cuda.begin_anew()
    cuda.Device(0).use()
    return cupy


@functools.cache
def fake_cupy():
    """The modules of the fake, none of which stays where an import finds it."""
    there = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "cupy"}
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        importlib.import_module("cupy.cuda.nccl")
    finally:
        sys.path.pop(0)
    found = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "cupy"}
    sys.modules.update(there)
    return found
