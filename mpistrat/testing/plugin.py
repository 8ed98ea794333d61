"""The plugin: its options and fixtures, and the choice between a rank of a job and a session that starts jobs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from mpistrat.testing import other_plugins
from mpistrat.testing.other_plugins import mpi_file_name, mpi_tmp_path, mpi_tmpdir  # noqa: F401 - fixtures
from mpistrat.testing.requirements import OPTIONS

if TYPE_CHECKING:
    import mpistrat
    from mpistrat.testing.programs import EndedProgram


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mpistrat", "tests of several MPI ranks")
    for name, (default, unit, text) in OPTIONS.items():
        group.addoption(name, type=type(default), default=default, metavar=unit, help=f"{text} [default: {default:g}]")
    other_plugins.add_options(group)
    group.addoption("--ranks-job", default="", help=argparse.SUPPRESS)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ranks(*sizes, min=1, max=None): run the test under each of these numbers of MPI ranks"
    )
    other_plugins.add_markers(config)
    if config.getoption("--ranks") < 1:
        raise pytest.UsageError("--ranks: give a number of ranks, at least 1")
    if config.getoption("--ranks-job") or _is_rank(config):
        from mpistrat.testing.rank import join

        join(config)
    else:
        from mpistrat.testing.jobs import RanksJobs

        config.pluginmanager.register(RanksJobs(config), "mpistrat-ranks")


def pytest_report_header(config: pytest.Config) -> list[str]:
    return other_plugins.header(config)


def _is_rank(config: pytest.Config) -> bool:
    """Return whether a launcher has started this process as one of its ranks."""
    # Importing the table of launchers takes 5 ms, so it comes second. All have a variable with one of these ends.
    if not any(name.endswith(("RANK", "RANKID", "PROCID")) for name in os.environ):
        return False
    from mpistrat.launch import launch, launchers

    started = launch.started_tasks(os.environ)
    if started is None or started.tasks > 1:
        return started is not None
    # A shell of Slurm is one task of srun, too. And pytest-xdist may share the tests of one rank out.
    shared = config.getoption("numprocesses", None) or hasattr(config, "workerinput")
    return started.variable not in launchers.SRUN.size and not shared


@pytest.fixture(scope="session")
def comm() -> Iterator[Any]:
    """Duplicate ``MPI.COMM_WORLD`` for the messages of tests."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture(scope="session")
def rank(comm: Any) -> int:
    """Return the rank of this process in ``comm``."""
    return int(comm.rank)


@pytest.fixture
def strategy() -> mpistrat.Strategy:
    """Make a `MultiWorkerMirroredStrategy` over all ranks."""
    import mpistrat

    return mpistrat.MultiWorkerMirroredStrategy()


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., EndedProgram]:
    """Return ``run_ranks(size, *arguments, limit=120, cwd=None, **environ)``: this Python under several ranks."""
    from mpistrat.testing import programs

    return programs.run_ranks
