"""What a test requires: numbers of ranks, by its marker ``ranks``, and time."""

from __future__ import annotations

import math
import re

import pytest

from mpistrat.testing import other_plugins
from mpistrat.testing.sizes import Sizes

#: The options by name: default, unit and help.
OPTIONS: dict[str, tuple[int | float, str, str]] = {
    "--ranks": (2, "N", "ranks of tests whose marker gives no number"),
    "--ranks-patience": (
        10.0,
        "SECONDS",
        "for the other ranks to end a test that failed on one rank, before the job is ended",
    ),
    "--ranks-timeout": (60.0, "SECONDS", "that a test may take before the job is ended, 0 for no limit"),
}
PARAMETER = "ranks of the job"
# Parameters may be handles of MPI, whose numbers are addresses: they differ from process to process.
_ADDRESS = re.compile(r"\b(0x[0-9a-fA-F]{8,}|\d{10,})\b")
_FIXTURES = ("comm", "rank", "strategy", "mpi_file_name", "mpi_tmp_path", "mpi_tmpdir")


def sizes_of(node: pytest.Item | pytest.Collector) -> Sizes | None:
    """Return the numbers of ranks that a test asks for, or None if it asks for no ranks."""
    if (mark := node.get_closest_marker("ranks")) is not None:
        return _of_ranks(node.nodeid, mark)
    return other_plugins.sizes_of(node)


def needs_ranks(item: pytest.Item) -> bool:
    """Return whether a test asks for ranks, by a marker or by a fixture of this plugin."""
    if sizes_of(item) is not None:
        return True
    info = getattr(item, "_fixtureinfo", None)
    definitions = info.name2fixturedefs if info is not None else {}
    # A suite may define a fixture of the same name.
    return any(definitions[name][-1].func.__module__.startswith("mpistrat.") for name in definitions.keys() & _FIXTURES)


def name_of(item: pytest.Item) -> str:
    """Return the name of a test on all ranks: its node ID, without a rank that a suite adds, and addresses."""
    name = f"{item.parent.nodeid}::{item.name}" if item.parent is not None else item.nodeid
    without = _ADDRESS.sub("address", name)
    if without == name or not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return name
    return f"{without} {[index for argument, index in item.callspec.indices.items() if argument != PARAMETER]}"


def _of_ranks(name: str, mark: pytest.Mark) -> Sizes:
    bounds = {"least": mark.kwargs.get("min", 1), "most": mark.kwargs.get("max", Sizes().most)}
    numbers = [*mark.args, *bounds.values()]
    wrong = set(mark.kwargs) - {"min", "max"} or (mark.args and mark.kwargs)
    # By its type: True is an instance of int.
    if wrong or not all(type(number) is int and number > 0 for number in numbers) or bounds["least"] > bounds["most"]:
        raise pytest.UsageError(
            f"{name}: {mark.args} {mark.kwargs} are not numbers of ranks: write ranks(3), ranks(1, 3) or "
            "ranks(min=2, max=4)"
        )
    return Sizes(mark.args, **bounds)


def parametrize(metafunc: pytest.Metafunc, sizes: tuple[int, ...]) -> None:
    """Let a test function run once for each number of ranks, which its name then shows."""
    name = other_plugins.name_of_size(metafunc.definition)
    if name:
        metafunc.fixturenames.append(PARAMETER)
        metafunc.parametrize(PARAMETER, sizes, ids=[f"{name}{size}" for size in sizes])


def size_of(item: pytest.Item, preferred: int) -> int | None:
    """Return the number of ranks under which an item runs, or None if it asks for no ranks."""
    call = getattr(item, "callspec", None)
    if call is not None and PARAMETER in call.params:
        return int(call.params[PARAMETER])
    sizes = sizes_of(item)
    if sizes is None:
        return None
    if len(sizes.listed) > 1:
        raise pytest.UsageError(f"{item.nodeid}: only a function or class that pytest collects can ask for {sizes}")
    return sizes.chosen(preferred)[0]


def mark_sizes(config: pytest.Config, items: list[pytest.Item], size: int | None) -> None:
    """Let ``-m "parallel[3]"`` and ``-m "parallel[match]"`` select tests as under mpi-pytest, if it is not installed.

    ``size`` is None outside of ranks.
    """
    if "parallel[" not in config.option.markexpr or config.pluginmanager.hasplugin("mpi-pytest"):
        return
    for item in items:
        sizes = sizes_of(item)
        if size is None:
            number = size_of(item, config.getoption("--ranks")) or 1
        else:
            number = 1 if sizes is None else size if size in sizes else sizes.chosen(size)[0]
        for name in (f"parallel[{number}]", *["parallel[match]"] * (number == (size or 1))):
            config.addinivalue_line("markers", name)
            item.add_marker(name)


def seconds_of(item: pytest.Item) -> float:
    """Return the seconds that a test may take: by its marker of pytest-timeout, or by ``--ranks-timeout``.

    A longer limit of pytest-timeout for all tests counts as well.
    """
    config = item.config
    limit = config.getoption("--ranks-timeout") or math.inf
    if (mark := item.get_closest_marker("timeout")) is not None:
        limit = float((*mark.args, mark.kwargs.get("timeout", limit))[0] or math.inf)
        return limit + config.getoption("--ranks-patience") + 1  # pytest-timeout comes first, where it can
    if limit == OPTIONS["--ranks-timeout"][0] and config.pluginmanager.hasplugin("timeout"):
        other = config.getoption("timeout", None) or config.getini("timeout") or limit
        return max(limit, float(other or math.inf))
    return limit
