"""The progress of a training loop in a log."""

import re
import time

import pytest

import mpistrat
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
    assert re.fullmatch(
        rf"mpistrat {mpistrat.__version__}, 1 rank\(s\) on 1 node\(s\), .*, SLURM_JOB_ID=4711", header
    )
    assert len(lines) >= 3
    assert all(re.match(r"epoch 1: +\d+% [1-6]/6 \[\d\d:\d\d<\d\d:\d\d,.*loss=\d", line) for line in lines), (
        lines
    )
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
