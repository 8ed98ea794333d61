"""What the serial tests share: starting programs under several ranks, and reporting on them."""

from __future__ import annotations

import faulthandler
import gc
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import hypothesis
import pytest

from mpistrat.testing import plugin, programs
from mpistrat.testing.programs import EndedProgram

# Until the tests are collected. They stay, and to look at all objects takes 0.1 s each time.
gc.disable()

ROOT = Path(__file__).parents[1]

# ranks: programs for several ranks, which test_ranks.py starts. The others run only if they are asked for.
# A path on the command line wins over this.
collect_ignore = ["cluster", "documentation/test_in_browser.py", "ranks", "slurm"]

# A shell that starts a program in the background makes it ignore these, and with it all that it starts.
for number, default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)

# The same examples in every run, and no limit on the time of one: on a busy machine any may take long.
hypothesis.settings.register_profile("alone", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("alone")

# The name under which a test keeps what `summarize` was given. Reports carry it from a worker of pytest-xdist, too.
INNER_SUMMARY = "inner summary"

# Without its fabric transport, which Open MPI sleeps for a second to put aside; and who waits leaves its core to
# others: on a machine that has more to do, a rank would else wait for whole time slices of one that waits for it.
_HERE = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mpi_yield_when_idle": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}


def run_program(command: list[str], limit: float, cwd: Path = ROOT, **environ: str) -> EndedProgram:
    """Run a program of this tree to its end, or to its limit in seconds."""
    # A program with its own limit may take longer than faulthandler grants a test of this process.
    faulthandler.cancel_dump_traceback_later()
    own = {name: value for name, value in _HERE.items() if name not in os.environ}
    own |= {"MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1", **environ}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return programs.run_program(command, limit, cwd, **own)


@pytest.fixture(scope="session")
def run_alone() -> Callable[..., EndedProgram]:
    """``run_alone(*arguments, limit=120)``: this Python with these arguments, in a process of its own."""

    def run(*arguments: str | Path, limit: float = 120, cwd: Path = ROOT, **environ: str) -> EndedProgram:
        return run_program([sys.executable, *map(str, arguments)], limit, cwd, **environ)

    return run


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., EndedProgram]:
    """``run_ranks(n, *arguments, limit=120)``: this Python with these arguments, under n ranks.

    ``MPISTRAT_TEST_LAUNCHER="srun -n {n}"`` in the environment starts the ranks with another launcher.
    """

    def run(n: int, *arguments: str | Path, limit: float = 120, cwd: Path = ROOT, **environ: str) -> EndedProgram:
        launcher = [sys.executable, "-m", "mpistrat", "run", "-n", str(n)]
        if "MPISTRAT_TEST_LAUNCHER" in os.environ:
            launcher = [*shlex.split(os.environ["MPISTRAT_TEST_LAUNCHER"].format(n=n)), sys.executable]
        return run_program([*launcher, *map(str, arguments)], limit, cwd, **environ)

    return run


@pytest.fixture(scope="module")
def two_at_a_time(request: pytest.FixtureRequest) -> Iterator[Callable[..., dict[str, Future[EndedProgram]]]]:
    """``two_at_a_time(start)``: how ``start(name)`` ends, for each ``name`` that tests of this file were given.

    Starting and ending a job is mostly waiting.
    """
    names = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    pool = ThreadPoolExecutor(2)
    yield lambda start: {name: pool.submit(start, name) for name in names}
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def summarize(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Add a text to the section on several ranks at the end of the output."""

    def add(text: str) -> None:
        request.node.user_properties.append((INNER_SUMMARY, text))

    return add


# --- the core and the rest -----------------------------------------------------------------------------

# Fixtures of tests that take long: they start ranks, or stand in for a GPU.
_OF_THE_REST = {"run_ranks", "cupy"}


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("mpistrat"):  # an environment that was made before the package had this plugin
        pluginmanager.register(plugin, "mpistrat")
    parser.addoption("--full", action="store_true", help="run the tests marked `full`, too")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it every rank compiles the package anew


@pytest.hookimpl(tryfirst=True)  # before -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests as `full` by what they use, unless they are marked `core`; run the core unless more is asked for.

    More is asked for by ``--full``, and by whatever selects tests: a path, ``-m``, ``-k``.
    """
    for item in items:
        if item.get_closest_marker("core") is None and (
            item.get_closest_marker("fault") is not None or _OF_THE_REST & set(getattr(item, "fixturenames", ()))
        ):
            item.add_marker("full")
    # The longest first: a worker of pytest-xdist that meets one last works alone.
    items.sort(key=lambda item: item.path.name != "test_ranks.py")
    option = config.option
    selected = config.args_source is pytest.Config.ArgsSource.ARGS or option.markexpr or option.keyword
    if not (option.full or selected):
        rest = [item for item in items if item.get_closest_marker("full") is not None]
        config.hook.pytest_deselected(items=rest)
        items[:] = [item for item in items if item.get_closest_marker("full") is None]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    texts = [
        text
        for report in reports
        if getattr(report, "when", None) == "teardown"
        for name, text in report.user_properties
        if name == INNER_SUMMARY
    ]
    if texts:
        terminalreporter.section("tests under several ranks")
        for text in texts:
            terminalreporter.line(text)
