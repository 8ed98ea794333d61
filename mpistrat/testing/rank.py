"""Makes pytest of this process a rank: one of several that run the same tests, of which one reports."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
from mpi4py import MPI

from mpistrat.launch import launch
from mpistrat.runtime.environment import RuntimeOptions
from mpistrat.testing import other_plugins, requirements
from mpistrat.testing.channel import RankEnd
from mpistrat.testing.in_step import RANK, SIZE, InStep

# Options that the session outside applies, which runs the tests one by one.
_OPTIONS_OF_SESSION = (
    "lf",
    "failedfirst",
    "newfirst",
    "stepwise",
    "xmlpath",
    "maxfail",
    "durations",
    "pastebin",
    "report_log",
)


def join(config: pytest.Config) -> None:
    """Register the plugins of a rank. Raise UsageError if pytest has options that cannot work in a rank."""
    try:
        launch.check_singleton(SIZE, MPI.Get_library_version(), os.environ)
    except launch.AloneError as error:
        raise pytest.UsageError(str(error)) from None
    if SIZE > 1 and config.getoption("usepdb"):
        raise pytest.UsageError(
            "--pdb would stop one rank while the others wait: leave it out, and write breakpoint() in a test under "
            "`if comm.rank == 0:`, with -s and --ranks-timeout 0"
        )
    if SIZE > 1 and config.getoption("numprocesses", None):
        raise pytest.UsageError("-n: each rank runs all tests. Leave it out, or leave the launcher out")
    address = config.getoption("--ranks-job")
    outside = RankEnd(address, RANK) if address else None
    if outside is not None:
        config.args = outside.receive()
    if outside is not None or RANK > 0:
        config.option.xmlpath, config.option.log_file = None, os.devnull  # also where the configuration names a file
        if config.option.basetemp:
            config.option.basetemp = Path(f"{config.option.basetemp}-rank{RANK}-of-{SIZE}")
    if outside is not None:
        for name in _OPTIONS_OF_SESSION:
            if hasattr(config.option, name):
                setattr(config.option, name, 0)
    if (limit := 0.75 * config.getoption("--ranks-timeout")) and limit < RuntimeOptions.hang_seconds.default:
        # The report of a hang that the package itself makes has to come before this one's.
        os.environ.setdefault(RuntimeOptions.hang_seconds.variable, f"{limit:g}")
    rank = _Rank(silent=outside is not None or RANK > 0)
    in_step = InStep(config, outside, rank.leave)
    config.pluginmanager.register(in_step, "mpistrat-in-step")
    config.pluginmanager.register(rank, "mpistrat-rank")
    if importlib.util.find_spec("hypothesis") is not None:
        from mpistrat.testing.properties import InStepProperties

        config.pluginmanager.register(InStepProperties(in_step), "mpistrat-properties")


class _Rank:
    """The hooks and fixtures in which a rank differs from a session that is alone."""

    def __init__(self, *, silent: bool):
        self._silent = silent
        self._apart = False

    @pytest.hookimpl(tryfirst=True)  # before the terminal reporter writes its first line
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if self._silent and session.config.pluginmanager.hasplugin("terminalreporter"):
            writer = session.config.get_terminal_writer()
            self._writer, self._file = writer, writer._file
            writer._file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the process lives

    def leave(self) -> None:
        """Let this process report its tests, which are not in step with the other ranks."""
        if self._silent and hasattr(self, "_writer"):
            self._writer._file.close()
            self._writer._file = self._file
        self._silent, self._apart = False, True

    def pytest_report_header(self) -> str:
        return f"ranks: {SIZE}, {launch.library_name(MPI.Get_library_version())}"

    @pytest.hookimpl(trylast=True)  # the number of ranks ends the name of a test
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        sizes = requirements.sizes_of(metafunc.definition)
        if sizes is not None and SIZE in sizes:
            requirements.parametrize(metafunc, (SIZE,))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        other_plugins.mark_items(config, items, SIZE)
        requirements.mark_sizes(config, items, SIZE)
        for item in items:
            sizes = requirements.sizes_of(item)
            if sizes is not None and SIZE not in sizes:
                item.add_marker(pytest.mark.skip(reason=f"for {sizes}, this run has {SIZE}"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._silent:
            session.config.option.cacheshow = True  # the cache of pytest is then not written
        if session.config.getoption("--ranks-job"):
            session.exitstatus = pytest.ExitCode.OK  # the session outside knows what has failed

    @pytest.fixture
    def tmp_path(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Make an empty directory, the same on every rank of a test that asks for ranks."""
        alone = self._apart or not requirements.needs_ranks(request.node)
        path = Path()
        if alone or RANK == 0:
            path = tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])  # as pytest does
        return path if alone else Path(request.getfixturevalue("comm").bcast(path))
