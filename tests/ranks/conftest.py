"""What the tests under several ranks add to the plugin of the package (``mpistrat/testing``), which runs them."""

from __future__ import annotations

import importlib
import os
import pkgutil
import warnings

import hypothesis
import pytest
from mpi4py import MPI

SIZES = (1, 2, 3, 4)  # that test_ranks.py starts

hypothesis.settings.register_profile("few", max_examples=50)
hypothesis.settings.load_profile("few")

# Hypothesis draws constants out of the modules that are loaded, so no rank may load one of the package that others do
# not: rank 0 alone writes and reads files.
for package in ("collectives", "data", "training"):
    path = importlib.import_module(f"mpistrat.{package}").__path__
    for module in pkgutil.walk_packages(path, f"mpistrat.{package}."):
        importlib.import_module(module.name)


@pytest.fixture
def cupy(monkeypatch):
    """CuPy where MPISTRAT_TEST_GPU is set, else what stands in for it on a machine without a GPU."""
    if os.environ.get("MPISTRAT_TEST_GPU"):
        import cupy

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of CuPy's where there is no NCCL
            importlib.import_module("cupy.cuda.nccl")  # which `import cupy` does not
        cupy.cuda.Device(MPI.COMM_WORLD.rank % cupy.cuda.runtime.getDeviceCount()).use()
        return cupy
    from fakes.install import stand_in

    return stand_in(monkeypatch)


def pytest_configure(config):
    config.addinivalue_line("markers", "four_ranks: four ranks meet what three do not: layouts of nodes")


@pytest.hookimpl(tryfirst=True)  # before -m
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("ranks") is None and item.config.pluginmanager.hasplugin("mpistrat-rank"):
            item.add_marker("ranks")  # a test without fixtures, too: all ranks run it alike
        for mark in item.iter_markers("ranks"):
            least, most = mark.kwargs.get("min", SIZES[0]), mark.kwargs.get("max", SIZES[-1])
            if mark.args or most > SIZES[-1] or least > SIZES[-1]:
                raise pytest.UsageError(f"{item.nodeid}: no launch of the suite runs {mark}")
            if least == SIZES[-1]:
                item.add_marker("four_ranks")
