"""The markers, options and fixtures of pytest-mpi and mpi-pytest, for suites that were written for these plugins.

Where one of them is installed, its markers are left to it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mpistrat.testing.sizes import Sizes

_PARALLEL = 3  # ranks of mpi-pytest without a number
_MARKERS = {
    "pytest_mpi": (
        "mpi(min_size=None): run the test under several ranks",
        "mpi_skip: skip the test under several ranks",
        "mpi_xfail: expect the test to fail under several ranks",
        "mpi_break: skip the test under several ranks",
    ),
    "mpi-pytest": (f"parallel(nprocs={_PARALLEL}): run the test under this number of ranks, or each of several",),
}
_UNDER_RANKS = {
    "mpi_skip": pytest.mark.skip(reason="test does not work under mpi"),
    "mpi_break": pytest.mark.skip(reason="test does not work under mpi"),
    "mpi_xfail": pytest.mark.xfail(reason="test fails under mpi"),
}


def _installed(config: pytest.Config) -> list[str]:
    """Return the other plugins that are installed."""
    return [name for name in _MARKERS if config.pluginmanager.hasplugin(name)]


def add_options(group: pytest.OptionGroup) -> None:
    """Add the options of pytest-mpi, unless it does."""
    if importlib.util.find_spec("pytest_mpi") is None:
        group.addoption(
            "--with-mpi", action="store_true", help="accepted, as by pytest-mpi: tests marked mpi run anyway"
        )
        group.addoption(
            "--only-mpi", action="store_true", help="skip tests that are not marked mpi, as pytest-mpi does"
        )


def add_markers(config: pytest.Config) -> None:
    """Register the markers of the other plugins that are not installed."""
    for name in _MARKERS.keys() - _installed(config):
        for line in _MARKERS[name]:
            config.addinivalue_line("markers", line)


def header(config: pytest.Config) -> list[str]:
    """Return a line that names the plugins whose markers are left to them."""
    return [f"mpistrat: leaves the markers of {name} to it" for name in _installed(config)]


def sizes_of(node: pytest.Item | pytest.Collector) -> Sizes | None:
    """Return the numbers of ranks that a marker of another plugin asks for."""
    installed = _installed(node.config)
    if "mpi-pytest" not in installed and (mark := node.get_closest_marker("parallel")) is not None:
        listed = _numbers_of(mark)
        return Sizes(listed) if all(type(number) is int and number > 0 for number in listed) else None
    if "pytest_mpi" not in installed and (mark := node.get_closest_marker("mpi")) is not None:
        return Sizes(least=mark.kwargs.get("min_size") or 1)
    return None


def name_of_size(node: pytest.Item | pytest.Collector) -> str:
    """Return the text before the number of ranks in the name of a test; empty if its plugin shows no number."""
    if node.get_closest_marker("ranks") is not None:
        return "ranks"
    mark = node.get_closest_marker("parallel")
    return "nprocs=" if mark is not None and len(_numbers_of(mark)) > 1 else ""


def _numbers_of(mark: pytest.Mark) -> tuple[Any, ...]:
    """Return the numbers of ranks of a marker of mpi-pytest. Other projects have markers of this name, too."""
    if mark.kwargs.keys() - {"nprocs"}:
        return (None,)
    sizes: Any = (*mark.args, *mark.kwargs.values(), _PARALLEL)[0]
    return tuple(sizes) if isinstance(sizes, Iterable) else (sizes,)


def mark_items(config: pytest.Config, items: list[pytest.Item], size: int | None) -> None:
    """Skip tests, or expect them to fail, by markers of pytest-mpi. ``size`` is None outside of ranks."""
    if "pytest_mpi" in _installed(config):
        return
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        for name in _UNDER_RANKS.keys() & names if size is not None else ():
            item.add_marker(_UNDER_RANKS[name])
        if config.getoption("--only-mpi", False) and "mpi" not in names:
            item.add_marker(pytest.mark.skip(reason="test does not use mpi"))


@pytest.fixture
def mpi_tmp_path(tmp_path: Path) -> Path:
    """Make an empty directory, the same on every rank."""
    return tmp_path


@pytest.fixture
def mpi_tmpdir(tmpdir: Any) -> Any:
    """Make an empty directory, the same on every rank, as an object of ``py.path``."""
    return tmpdir


@pytest.fixture
def mpi_file_name(tmp_path: Path) -> str:
    """Return the name of a file that does not exist, the same on every rank."""
    return str(tmp_path / "file.hdf5")
