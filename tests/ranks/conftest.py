"""Pytest under several ranks: every rank runs the same tests, and all of them know how each one went.

After each test, and after a setup or teardown that did not pass, the ranks exchange their verdicts. If all
arrive at the same phase, what failed anywhere fails everywhere, rank 0 shows the traceback of every rank that
failed, and the run goes on. A rank that failed waits only ``--patience`` seconds: the others may stand in a
collective call that it never reached. It then prints its traceback and aborts the job. So does a rank whose
setup or teardown alone failed. Only rank 0 reports.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import pkgutil
import re
import sys
import threading
import time
import traceback
import types
import warnings
import zlib

import hypothesis
import numpy as np
import pytest
from mpi4py import MPI

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SIZES = (1, 2, 3, 4)  # that test_ranks.py starts

# Equal examples on every rank: nothing random, nothing remembered, nothing that depends on time.
hypothesis.settings.register_profile(
    "ranks",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink),
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("ranks")

# Hypothesis draws constants out of the modules that are loaded, so no rank may load one of the package that others do
# not: rank 0 alone writes and reads files.
for package in ("collectives", "data", "training"):
    path = importlib.import_module(f"mpistrat.{package}").__path__
    for module in pkgutil.walk_packages(path, f"mpistrat.{package}."):
        importlib.import_module(module.name)


# --- what a test asks for ------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def comm():
    """A communicator over all ranks that only tests use."""
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture
def strategy():
    """A new strategy over all ranks."""
    import mpistrat

    return mpistrat.MultiWorkerMirroredStrategy()


@pytest.fixture
def tmp_path(comm, request, tmp_path_factory):
    """An empty directory, the same on every rank."""
    path = None
    if comm.rank == 0:
        path = tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])
    return comm.bcast(path)


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
    from fakes.install import stand_in  # here: test_harness.py takes this file alone

    return stand_in(monkeypatch)


# --- verdicts ------------------------------------------------------------------------------------------


class Ranks:
    """All ranks of this run, kept in step by exchanging what each has to say at the same points."""

    def __init__(self, patience: float):
        self.comm = MPI.COMM_WORLD.Dup()
        self.patience = patience
        self.stderr = os.dup(2)  # the real one: pytest captures the other
        self.collect_errors: list[str] = []

    def exchange(self, point: str, verdict: str, message: str = "", text: str = "") -> list[list[str]]:
        """Every rank's ``[verdict, message, text]``, by rank. Who did not pass waits for a limited time."""
        limit = None if verdict == "passed" else time.monotonic() + self.patience
        # Most have nothing to tell: one small collective call, and a second one only for those who do.
        told = b"" if (verdict, text) == ("passed", "") else json.dumps([verdict, message, text]).encode()
        mine = np.array([zlib.crc32(point.encode()), len(told)], np.int64)
        heads = np.empty((SIZE, 2), np.int64)
        if not self._wait(self.comm.Iallgather(mine, heads), limit):
            self.abort(
                f"rank {RANK} of {SIZE}: {point}: {verdict}\n{text}\n"
                f"The others did not come so far within {self.patience:g} s: they may wait for this rank."
            )
        if (heads[:, 0] != heads[0, 0]).any():
            self.abort(f"rank {RANK} of {SIZE} is at: {point}: {verdict}\n{text}\nThe ranks are out of step.")
        counts = heads[:, 1]
        if not counts.any():
            return [["passed", "", ""]] * SIZE
        told_by_all = np.empty(counts.sum(), np.uint8)
        self._wait(self.comm.Iallgatherv(np.frombuffer(told, np.uint8), [told_by_all, counts]), None)
        parts = np.split(told_by_all, np.cumsum(counts)[:-1])
        return [json.loads(part.tobytes()) if part.size else ["passed", "", ""] for part in parts]

    def _wait(self, request: MPI.Request, limit: float | None) -> bool:
        start = time.monotonic()
        while not request.Test():
            now = time.monotonic()
            if limit is not None and now > limit:
                return False
            time.sleep(0 if now - start < 0.002 else 0.001)
        return True

    def write(self, text: str) -> None:
        """All of a text on the real standard error, so that no other rank's output comes between."""
        rest = f"\n{'=' * 100}\n{text.rstrip()}\n{'=' * 100}\n".encode()
        while rest:
            rest = rest[os.write(self.stderr, rest) :]

    def abort(self, text: str) -> None:
        sys.stdout.flush()
        self.write(text)
        time.sleep(1)  # for the launcher to pass it on, and for others that failed as well
        self.comm.Abort(1)

    # What follows are hooks of pytest.

    def pytest_collectreport(self, report):
        if report.failed:
            self.collect_errors.append(report.longreprtext)

    def pytest_collection_finish(self, session):
        found = "\n".join(self.collect_errors or [item.nodeid for item in session.items])
        told = self.exchange("collection", "passed", text=found)
        if any(text != found for *_, text in told):
            pytest.exit("The ranks did not collect the same tests.\n" + merge(told)[1], returncode=2)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.passed and call.when != "call":
            return report  # each exchange waits for the slowest rank
        message = text = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr[2]
        elif not report.passed:
            message = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
            text = report.longreprtext
            if RANK > 0:  # rank 0 shows its own anyway
                text += "".join(f"\n{f' {name} ':-^80}\n{content}" for name, content in report.sections)
        told = self.exchange(f"{item.nodeid}, {call.when}", report.outcome, message, text)
        verdicts = {verdict for verdict, *_ in told}
        texts = {without_addresses(text) for *_, text in told}
        if len(verdicts) > 1 or ("failed" in verdicts and len(texts) > 1):
            report.outcome = "failed"
            report.longrepr = Merged(*merge(told))
            if hasattr(report, "wasxfail"):
                del report.wasxfail
        return report

    def pytest_itemcollected(self, item):
        test = getattr(item, "obj", None)
        if hypothesis.is_hypothesis_test(test) and not hasattr(test.hypothesis.inner_test, "in_step"):
            test.hypothesis.inner_test = in_step(self, test.hypothesis.inner_test, frozenset(item.fixturenames))

    def pytest_unconfigure(self, config):
        # The ranks whose program fails may be ended at once: rank 0 has to have reported before.
        sys.stdout.flush()
        self.exchange("the end", "passed")

    def pytest_internalerror(self, excrepr, excinfo):
        if SIZE > 1:
            self.abort(f"rank {RANK} of {SIZE}: an error of pytest itself\n{excrepr}")

    def pytest_timeout_set_timer(self, item, settings):
        """Show where this rank stands, leave the others the time to do the same, and end."""

        def expire():
            current = threading.get_ident()
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            title = f"rank {RANK} of {SIZE}: {item.nodeid} takes longer than {settings.timeout:g} s:"
            stacks = [
                f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
                for ident, frame in sys._current_frames().items()
                if ident != current
            ]
            self.write("\n".join([title, *stacks]))
            time.sleep(2)
            os._exit(1)

        timer = threading.Timer(settings.timeout, expire)
        timer.daemon = True
        timer.start()

        def cancel():
            timer.cancel()
            timer.join()

        item.cancel_timeout = cancel
        return True


def without_addresses(text: str) -> str:
    return re.sub("0x[0-9a-f]+", "", text)


def merge(told: list[list[str]]) -> tuple[str, str]:
    """The message and the text of several ranks as one, those that differ in addresses only once."""
    same: dict[tuple[str, str], list[int]] = {}
    for rank, (verdict, _, text) in enumerate(told):
        same.setdefault((verdict, without_addresses(text)), []).append(rank)
    summary, texts = "", []
    for ranks in same.values():
        verdict, message, text = told[ranks[0]]
        name = f"{verdict} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {SIZE}"
        texts.append(f"{f' {name} ':-^100}\n{text}".rstrip())
        if verdict == "failed" and not summary:
            summary = f"{name}: {message}"
    return summary or "the ranks disagree", "\n\n".join(texts)


class Merged:
    """What failed on several ranks, in the form in which pytest shows it."""

    def __init__(self, message: str, text: str):
        self.text = text
        self.reprcrash = types.SimpleNamespace(message=message)  # of the short summary

    def __str__(self) -> str:
        return self.text

    def toterminal(self, writer: pytest.TerminalWriter) -> None:
        writer.line(self.text)


# --- property tests ------------------------------------------------------------------------------------


def in_step(ranks: Ranks, test, fixtures: frozenset[str]):
    """A property test whose examples end alike on every rank, with the same error at the same place.

    Otherwise the rank that failed would go on to shrink its example, alone.
    """

    @functools.wraps(test)
    def example(*args, **kwargs):
        __tracebackhide__ = True
        drawn = {name: value for name, value in kwargs.items() if name not in fixtures}
        shown = without_addresses(repr(drawn))
        told = ranks.exchange(f"example of {test.__qualname__}", "passed", text=shown)
        if any(text != shown for *_, text in told):
            raise RuntimeError("The ranks drew different examples:\n" + merge(told)[1])
        verdict, message, text, rejected = "passed", "", "", None
        try:
            test(*args, **kwargs)
        except (hypothesis.errors.UnsatisfiedAssumption, hypothesis.errors.StopTest) as error:
            verdict, rejected = "rejected", error
        except (Exception, pytest.fail.Exception) as error:
            verdict, message = "failed", traceback.format_exception_only(error)[-1].strip()
            text = "".join(traceback.format_exception(error))
        told = ranks.exchange(f"end of an example of {test.__qualname__}", verdict, message, text)
        verdicts = {verdict for verdict, *_ in told}
        if verdicts == {"rejected"}:
            raise rejected
        if verdicts != {"passed"}:
            raise AssertionError("\n".join(merge(told)))

    example.in_step = True
    return example


# --- the run -------------------------------------------------------------------------------------------


def pytest_addoption(parser):
    text = "seconds that a rank whose test failed waits for the others before it aborts the job"
    parser.addoption("--patience", type=float, default=10, help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    config.addinivalue_line("markers", f"ranks(min=1, max={SIZES[-1]}): the numbers of ranks it can run under")
    config.addinivalue_line("markers", "four_ranks: four ranks meet what three do not: layouts of nodes")
    config.pluginmanager.register(Ranks(config.getoption("--patience")), "ranks")
    if RANK > 0:
        # The terminal reporter, made between this and the next function, takes what is standard output now.
        config.standard_output = sys.stdout
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives


@pytest.hookimpl(trylast=True, specname="pytest_configure")
def restore_standard_output(config):
    if RANK > 0:
        sys.stdout = config.standard_output


def pytest_report_header(config):
    return f"ranks: {SIZE}, {MPI.Get_library_version().splitlines()[0].rstrip(chr(0))}"


@pytest.hookimpl(tryfirst=True)  # before -m
def pytest_collection_modifyitems(items):
    for item in items:
        for mark in item.iter_markers("ranks"):
            least, most = mark.kwargs.get("min", SIZES[0]), mark.kwargs.get("max", SIZES[-1])
            if mark.args or not set(mark.kwargs) <= {"min", "max"} or not least <= most <= SIZES[-1]:
                raise pytest.UsageError(f"{item.nodeid}: no launch of the suite runs {mark}")
            if least == SIZES[-1]:
                item.add_marker("four_ranks")
            if not least <= SIZE <= most:
                sizes = f"{least} to {most}" if least < most else f"{least}"
                item.add_marker(pytest.mark.skip(reason=f"for {sizes} ranks, this run has {SIZE}"))
