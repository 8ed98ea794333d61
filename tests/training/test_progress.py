"""The progress of a training loop in a log."""

import contextlib
import io
import os
import re
import subprocess
import sys
import time
import warnings

import pytest

import mpistrat
from mpistrat.asynchronous.statistics import CallsBar
from mpistrat.training import progress


@pytest.fixture
def log(monkeypatch, capsys):
    """What standard error got, which is not a terminal: `log()`."""
    monkeypatch.delenv("MPISTRAT_PROGRESS", raising=False)
    return lambda: capsys.readouterr().err


def test_lines_in_a_log(log, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with mpistrat.MultiWorkerMirroredStrategy().scope():
        bar = progress(range(6), desc="epoch 1", every=0.01)
        for i in bar:
            bar.set_postfix(loss=i, refresh=False)
            time.sleep(0.02)
    written = log()
    header, *lines = written.splitlines()
    assert re.fullmatch(rf"mpistrat {mpistrat.__version__}, 1 rank\(s\) on 1 node\(s\), .*, SLURM_JOB_ID=4711", header)
    assert len(lines) >= 3
    assert all(re.match(r"epoch 1: +\d+% [1-6]/6 \[\d\d:\d\d<\d\d:\d\d,.*loss=\d", line) for line in lines), lines
    assert [line for line in lines if "6/6" in line] == lines[-1:]
    assert not re.search(r"\r|\x1b", written)


def test_short_loops_write_nothing(log):
    assert list(progress(range(5))) == list(range(5))
    assert log() == ""


def test_off(log, monkeypatch):
    monkeypatch.setenv("MPISTRAT_PROGRESS", "0")
    for _ in progress(range(3), every=0.0):
        time.sleep(0.01)
    assert log() == ""


def test_a_generator_has_no_total(log):
    for _ in progress((i for i in range(3)), every=0.001):
        time.sleep(0.01)
    assert re.search(r"^3it \[", log(), re.MULTILINE)


def test_loops_in_loops(log):
    for _ in progress(range(2), desc="epochs", every=0.0):
        for _ in progress(range(3), desc="steps", every=0.0):
            pass
    lines = [line for line in log().splitlines() if not line.startswith("mpistrat ")]
    steps = [f"steps: {i}/3" for i in (1, 2, 3)]
    assert [re.sub(r" +\d+%| \[.*", "", line) for line in lines] == [*steps, "epochs: 1/2", *steps, "epochs: 2/2"]


@pytest.mark.parametrize("desc", ["[train] epoch 1", "epoch [1/3]"])
def test_brackets_in_the_text(log, desc):
    for _ in progress(range(3), desc=desc, every=0.0):
        pass
    assert [line.partition(":")[0] for line in log().splitlines()[1:]] == [desc] * 3


@pytest.mark.parametrize("every", [0.0, 100.0])
def test_what_the_program_adds_does_not_write_lines_of_its_own(log, every):
    bar = progress(range(4), every=every)
    for i in bar:
        bar.set_postfix(loss=i)
    assert len(log().splitlines()) == (0 if every else 5)
    with progress(None, total=4, every=every) as bar:
        for i in range(4):
            bar.update(1)
            bar.set_postfix(loss=i)
    assert len(log().splitlines()) == (0 if every else 5)


def test_a_program_without_a_strategy_does_not_start_mpi():
    program = """
import sys
from mpistrat.training import progress
list(progress(range(2), every=0.0))
assert "mpi4py.MPI" not in sys.modules
"""
    environ = {name: value for name, value in os.environ.items() if name != "MPISTRAT_PROGRESS"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2/2" in done.stderr


# --- on a terminal -------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def a_bar_of_calls():
    bar = CallsBar(True)
    bar.queued(3)
    return bar


@pytest.mark.parametrize("made", [lambda: progress(range(3), desc="calls"), a_bar_of_calls])
def test_a_warning_does_not_break_bars(monkeypatch, made):
    def printed(*args):
        sys.stderr.write(warnings.formatwarning(*args[:4]))

    def is_whole(text):
        """Whether a warning begins a line from which a bar was removed, and bars were drawn after it."""
        found = re.search(rf"(.*\n?.*){re.escape(__file__)}:\d+: UserWarning: {text}\n", terminal.getvalue())
        return bool(re.search(r"\r +\r(\x1b\[A)*$", found[1])) and "calls:" in terminal.getvalue()[found.end() :]

    monkeypatch.delenv("MPISTRAT_PROGRESS", raising=False)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(warnings, "showwarning", printed)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        first, second = made(), made()
        warnings.warn("under two", stacklevel=1)
        assert is_whole("under two")
        first.close()  # out of order
        warnings.warn("under one", stacklevel=1)
        assert is_whole("under one")
        with warnings.catch_warnings(record=True) as recorded:
            warnings.warn("recorded", stacklevel=1)
            inner = made()
            warnings.warn("recorded under a bar", stacklevel=1)
            inner.close()
        second.close()
        assert warnings.showwarning is printed
    assert [str(each.message) for each in recorded] == ["recorded", "recorded under a bar"]
    assert "recorded" not in terminal.getvalue()


def test_bars_that_are_not_shown_leave_warnings_alone(monkeypatch):
    before = warnings.showwarning
    monkeypatch.setenv("MPISTRAT_PROGRESS", "0")
    bar = progress(range(3))
    assert warnings.showwarning is before
    bar.close()
    monkeypatch.delenv("MPISTRAT_PROGRESS")
    with contextlib.closing(progress(range(3))):  # in a log
        assert warnings.showwarning is before
