"""Ranks that others wait for: the report names the right rank and the right cause."""

import concurrent.futures
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.fault, pytest.mark.mpich]

PROGRAM = Path(__file__).with_name("hangs.py")
CULPRIT = 2
# What each fault of the program is reported as.
CAUSES = {
    "python": "Python code",
    "c_code": "C code",
    "sleep": "sleep",
    "stopped": "stopped",
    "lock": "lock",
    "pipe": "pipe",
    "skipped": "skipped",
}
# Those that end the job, by the launcher or by the time limit.
ENDS = {"order": "other order", "killed": "killed", "exits": "exited"}
OTHERS = "(?:rank [013]|ranks (?:0-1, 3|0-1|0, 3|1, 3))"  # some of those that wait
JOBS = (tuple(CAUSES), *((name,) for name in ENDS))


@pytest.fixture(scope="module")
def jobs(run_ranks, tmp_path_factory):
    """The jobs, two at a time: most of what they do is waiting."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("this machine has no /dev/shm")

    def run(names):
        folder = tmp_path_factory.mktemp(names[0])
        ended = run_ranks(
            4,
            PROGRAM,
            *names,
            limit=100,
            CULPRIT=str(CULPRIT),
            MPISTRAT_HANG_SECONDS="1.5",
            MPISTRAT_HANG_ABORT_SECONDS="8" if names == ("order",) else "0",
            MPISTRAT_RECORD_DIR=str(folder),
        )
        return ended, folder

    tmp_path_factory.getbasetemp()  # two threads would make two
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield {names: pool.submit(run, names) for names in JOBS}


def told(text, waiting="ranks 0-1, 3"):
    """The ranks that are waited for and the cause, of each report in a text."""
    ranks = rf"^.*{waiting} of 4 waits? for (ranks? [\d, -]+) since"
    return re.findall(ranks + r".*\n  in .*\n  .*\n  cause: ([^.]+)\.", text, re.MULTILINE)


def test_the_ranks_and_the_causes(jobs):
    ended, folder = jobs[tuple(CAUSES)].result()
    assert ended.status == 0, str(ended)
    # A fault may end while its second report is made: the first ones count. On a busy machine the first strategy may
    # take so long to make that this is reported, too.
    first = {}
    for path in sorted(folder.glob("hang-*"), key=lambda path: path.stat().st_mtime_ns):
        first.setdefault(tuple(path.name.split("-")[1:3]), path.read_text())
    texts = [text for text in first.values() if "the creation of a strategy" not in text]
    found = [each for text in texts for each in told(text)]
    assert found == [(f"rank {CULPRIT}", each) for each in CAUSES.values()], str(ended)


def test_every_report_is_printed_once(jobs):
    ended, folder = jobs[tuple(CAUSES)].result()
    paths = list(folder.glob("hang-*"))
    assert len(paths) >= len(CAUSES)
    assert all(ended.output.count(f"This report is in {path}.") == 1 for path in paths), str(ended)
    assert ended.output.count("where all ranks are:") == len(paths)


def test_two_orders_of_two_communicators_and_the_end_of_a_job_that_hangs(jobs):
    ended, _ = jobs["order",].result()
    assert ended.status == 42, str(ended)
    assert told(ended.output)[0] == (f"rank {CULPRIT}", ENDS["order"]), str(ended)
    assert ended.output.count("ends the job after") == 1, str(ended)


@pytest.mark.parametrize("name", ["killed", "exits"])
def test_the_last_record_names_a_rank_that_is_gone(jobs, name):
    ended, folder = jobs[name,].result()
    assert ended.status, str(ended)
    if name == "exits":
        ended.shows(
            f"mpistrat run: rank {CULPRIT} (", "ended by os._exit(0) without telling the others; its last"
        )
    (record,) = folder.glob("last-*.json")
    shown = subprocess.run(
        [sys.executable, "-m", "mpistrat", "top", "--last", record],
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    # The launcher may have ended other ranks before they came to the call.
    assert (f"rank {CULPRIT}", ENDS[name]) in told(shown.stdout, OTHERS), shown.stdout


LATE = """
import glob, os, time
from mpi4py import MPI
import mpistrat
while MPI.COMM_WORLD.rank == 1 and not glob.glob(os.environ["MPISTRAT_RECORD_DIR"] + "/hang-*"):
    time.sleep(5)
mpistrat.MultiWorkerMirroredStrategy()
"""


def test_a_rank_that_does_not_come_to_the_first_strategy(run_ranks, tmp_path):
    """It has no record yet: what the system tells of it is all that is known."""
    (tmp_path / "program.py").write_text(LATE)
    ended = run_ranks(
        3, tmp_path / "program.py", MPISTRAT_HANG_SECONDS="1", MPISTRAT_RECORD_DIR=str(tmp_path)
    ).check()
    ended.shows("ranks 0, 2 of 3 wait for rank 1 since", "in the creation of a strategy at", "cause: sleep.")


SLOW = """
import time
import numpy as np
import mpistrat
strategy = mpistrat.MultiWorkerMirroredStrategy()
for step in range(2):
    time.sleep(1.5 if strategy.comm.rank == step % 2 else 0.01)
    strategy.reduce("SUM", np.ones(3), axis=None)
"""


@pytest.mark.parametrize(("limit", "reports"), [("60", False), ("0.2", True)])
def test_slow_ranks_are_reported_beyond_the_limit_only(run_ranks, tmp_path, limit, reports):
    """Where no report can be written, it is printed alone, and the job goes on."""
    (tmp_path / "file").touch()
    (tmp_path / "program.py").write_text(SLOW)
    ended = run_ranks(
        2,
        tmp_path / "program.py",
        MPISTRAT_HANG_SECONDS=limit,
        MPISTRAT_RECORD_DIR=str(tmp_path / "file" / "below"),
    ).check()
    assert ("waits for rank" in ended.output) == reports, str(ended)
    assert ("This report is in no file" in ended.output) == reports, str(ended)


LEAVE = """
import ctypes, os, sys
import mpistrat
strategy = mpistrat.MultiWorkerMirroredStrategy()
strategy.barrier()
if sys.argv[1] == "all":
    os._exit(0)
if strategy.comm.rank == 1:
    ctypes.CDLL(None)._exit(0)
strategy.barrier()
"""


@pytest.mark.parametrize("who", ["all", "one"])
def test_the_exit_status_where_ranks_leave_without_the_end_of_their_program(run_ranks, tmp_path, who):
    """If all leave with status 0 they meant to succeed. A rank that C code ends has told nothing to its record."""
    (tmp_path / "program.py").write_text(LEAVE)
    ended = run_ranks(2, tmp_path / "program.py", who, MPISTRAT_RECORD_DIR=str(tmp_path))
    assert (ended.status == 0) == (who == "all"), str(ended)
    named = [line for line in ended.output.splitlines() if "ended without telling the others" in line]
    assert any("rank 1 (" in line for line in named) == (who == "one"), str(ended)
    # The launcher may have ended rank 0 before its barrier. Without the order it cannot be told from rank 1 then.
    assert len(named) == (who == "one") or not hasattr(os, "pidfd_open"), str(ended)
    assert ended.output.startswith("mpistrat run: ") == (who == "one"), str(ended)
