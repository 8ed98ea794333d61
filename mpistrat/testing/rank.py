"""Makes pytest of this process a rank: one of several that run the same tests, of which one reports."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from mpistrat.launch import launch
from mpistrat.runtime.environment import RuntimeOptions
from mpistrat.testing import asked, other_plugins
from mpistrat.testing.channel import RankEnd
from mpistrat.testing.in_step import RANK, SIZE, InStep

_LEFT_TO_OTHERS = ("lf", "failedfirst", "newfirst", "stepwise", "xmlpath", "maxfail", "durations")


def join(config: pytest.Config) -> None:
    """Register what a rank needs. Raise UsageError where pytest cannot run in a rank as it was asked to."""
    try:
        launch.check_singleton(SIZE, MPI.Get_library_version(), os.environ)
    except launch.AloneError as error:
        raise pytest.UsageError(str(error)) from None
    if SIZE > 1 and config.getoption("usepdb"):
        raise pytest.UsageError(
            "--pdb would stop one rank while the others wait: leave it out, and write breakpoint() in a test under "
            "`if comm.rank == 0:`, with -s and --ranks-timeout 0"
        )
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("-n: each rank runs all tests. Leave it out, or leave the launcher out")
    address = config.getoption("--ranks-job")
    outside = RankEnd(address, RANK) if address else None
    if outside is not None:
        config.args = outside.receive()
    if outside is not None or RANK > 0:
        config.option.xmlpath = None
        if config.option.basetemp:
            config.option.basetemp = Path(f"{config.option.basetemp}-rank{RANK}-of-{SIZE}")
    if outside is not None:
        for name in _LEFT_TO_OTHERS:
            if hasattr(config.option, name):
                setattr(config.option, name, 0)
    if (limit := 0.75 * config.getoption("--ranks-timeout")) and limit < RuntimeOptions.hang_seconds.default:
        # The report of a hang that the package itself makes has to come before this one's.
        os.environ.setdefault(RuntimeOptions.hang_seconds.variable, f"{limit:g}")
    in_step = InStep(config, outside)
    config.pluginmanager.register(in_step, "mpistrat-in-step")
    config.pluginmanager.register(_Rank(silent=outside is not None or RANK > 0), "mpistrat-rank")
    if importlib.util.find_spec("hypothesis") is not None:
        from mpistrat.testing.properties import InStepProperties

        config.pluginmanager.register(InStepProperties(in_step), "mpistrat-properties")


class _Rank:
    """What a rank does in another way than a session alone."""

    def __init__(self, *, silent: bool):
        self._silent = silent
        self._stdout = sys.stdout
        if silent:
            # The terminal reporter, made between this and `restore_stdout`, takes what is standard output now.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives

    def restore_stdout(self) -> None:
        """Let tests print, once the terminal reporter is made."""
        if self._silent:
            sys.stdout = self._stdout

    def pytest_report_header(self) -> str:
        return f"ranks: {SIZE}, {launch.library_name(MPI.Get_library_version())}"

    @pytest.hookimpl(trylast=True)  # the number of ranks ends the name of a test
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        sizes = asked.sizes_of(metafunc.definition)
        if sizes is not None and SIZE in sizes:
            asked.parametrize(metafunc, (SIZE,))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        other_plugins.mark_items(config, items, SIZE)
        for item in items:
            sizes = asked.sizes_of(item)
            if sizes is not None and SIZE not in sizes:
                item.add_marker(pytest.mark.skip(reason=f"for {sizes}, this run has {SIZE}"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._silent:
            session.config.option.cacheshow = True  # the cache of pytest is then not written
        if session.config.getoption("--ranks-job"):
            session.exitstatus = pytest.ExitCode.OK  # the session outside knows what has failed

    @pytest.fixture
    def tmp_path(
        self, comm: MPI.Comm, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Path:
        """Make an empty directory, the same on every rank."""
        path = None
        if comm.rank == 0:
            path = tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])
        return comm.bcast(path)
