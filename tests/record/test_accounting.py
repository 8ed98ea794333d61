"""The line at the end of a job, for the accounting of a site."""

import json
import os
import time

import pytest

import mpistrat
from mpistrat.monitor import accounting
from mpistrat.record.read import Record

PROGRAM = """
import os, signal, sys, time
import numpy as np
import mpistrat
from mpistrat.record import flight_record
strategy = mpistrat.MultiWorkerMirroredStrategy()
rank, size = strategy.comm.rank, strategy.comm.size
if rank == 1:
    held = np.ones(1 << 26, np.uint8)  # the most memory
strategy.barrier()  # a busy machine may take long for that memory
for _ in range(4):
    with flight_record.phase(flight_record.Phase.INPUT):
        time.sleep(0.05)
    if rank == 0:
        time.sleep(0.5)  # the slowest
    strategy.reduce("sum", np.ones(3), axis=None)
"""


@pytest.fixture
def job(run_ranks, tmp_path):
    """Run a job of 3 ranks to its end, and return its status and its lines."""

    def run(end="", **environ):
        (tmp_path / "program.py").write_text(PROGRAM + end)
        file = tmp_path / "lines"
        environ = {"MPISTRAT_ACCOUNTING": str(file), "SLURM_JOB_ID": "77", **environ}
        ended = run_ranks(3, tmp_path / "program.py", **environ)
        lines = file.read_text().splitlines() if file.exists() else []
        return ended, [json.loads(line) for line in lines]

    return run


@pytest.mark.full
def test_job_that_succeeds(job):
    began = time.time()
    ended, (line,) = job()
    assert ended.status == 0
    expected = {"ranks": 3, "nodes": 1, "exit": 0, "restart": 0, "lost_ranks": [], "measured_ranks": 3, "job": "77"}
    assert {name: line[name] for name in expected} == expected
    assert (line["slowest_rank"], line["memory_rank"], line["user"]) == (0, 1, os.geteuid())
    assert line["memory"] > 1 << 26
    assert line["program"].endswith("program.py")
    assert line["version"] == mpistrat.__version__
    assert began < line["end"] < time.time()
    # Two of three ranks wait for 2 s, and all are in input for 0.2 s.
    assert line["seconds"] > 1
    assert 0 < line["waiting"] <= line["collectives"] < 1
    assert line["waiting"] * line["seconds"] * 3 > 2
    assert line["input"] * line["seconds"] == pytest.approx(0.2, rel=1)


@pytest.mark.full
def test_nothing_is_written_where_it_is_off(job):
    assert job(MPISTRAT_ACCOUNTING="")[1] == []


@pytest.mark.parametrize(
    ("end", "status", "lost", "measured"),
    [
        ("if rank == 1: raise ValueError('wrong')\nstrategy.barrier()", 1, [], 1),
        pytest.param("sys.exit(7)", 7, [], 1, marks=pytest.mark.full),
        pytest.param("if rank == 2: os._exit(5)\nstrategy.barrier()", 5, [], 1, marks=pytest.mark.full),
        # The first rank leaves first: mpirun then kills the others, which counts as a loss for whoever sees it.
        pytest.param("time.sleep(rank)\nos._exit(0)", 0, [], 1, marks=pytest.mark.full),
        pytest.param(
            *("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nstrategy.barrier()", 137, [1], None),
            marks=pytest.mark.full,
        ),
    ],
)
def test_job_that_does_not_end_together(job, end, status, lost, measured):
    ended, lines = job(end)
    assert len(lines) == 1, (str(ended), lines)
    (line,) = lines
    assert (line["ranks"], line["exit"], line["lost_ranks"], line.get("measured_ranks")) == (3, status, lost, measured)


@pytest.mark.full
def test_job_whose_hang_is_ended(job):
    _, (line,) = job("if rank == 1: time.sleep(60)\nstrategy.barrier()", MPISTRAT_HANG_ABORT_SECONDS="2")
    assert line["exit"] == 43


@pytest.mark.full
def test_file_that_cannot_be_written_fails_no_job(job, tmp_path):
    ended, lines = job(MPISTRAT_ACCOUNTING=str(tmp_path / "none" / "file"))
    assert (ended.status, lines) == (0, [])
    ended.shows("no line of accounting is written to")


def test_syslog(monkeypatch):
    syslog = pytest.importorskip("syslog")
    said = []
    monkeypatch.setattr(syslog, "syslog", said.append)
    monkeypatch.setenv("MPISTRAT_ACCOUNTING", "syslog")
    accounting.write(Record(pid=1, rank=0, size=2, program="prog.py"), 2, {"nodes": 1}, 3)
    (line,) = map(json.loads, said)
    assert (line["ranks"], line["nodes"], line["exit"], line["program"]) == (2, 1, 3, "prog.py")
