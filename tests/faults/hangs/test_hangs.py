"""Ranks that others wait for: the report names the right rank and the right cause."""

import concurrent.futures
import re
import signal
import subprocess
import sys
from pathlib import Path

import hang_reports
import pytest
from causes import END, GO_ON

# A job of several faults may take longer than other tests on a busy machine.
pytestmark = [pytest.mark.fault, pytest.mark.mpich, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("hangs.py")
CULPRIT = 2
OTHERS = "(?:rank [013]|ranks (?:0-1, 3|0-1|0, 3|1, 3))"  # some of those that wait
JOBS = (tuple(GO_ON), *((name,) for name in END))  # the faults that end a job have one each


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
            limit=600,
            CULPRIT=str(CULPRIT),
            MPISTRAT_HANG_SECONDS="3",
            # There are reports after 3, 6 and 12 s: the first ones may lack a rank that is late.
            MPISTRAT_HANG_ABORT_SECONDS="20" if names == ("order",) else "0",
            MPISTRAT_RECORD_DIR=str(folder),
        )
        return ended, folder

    tmp_path_factory.getbasetemp()  # two threads would make two
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield {names: pool.submit(run, names) for names in JOBS}


def told(text, waiting="ranks 0-1, 3"):
    """The ranks that are waited for and the cause, of each report in a text."""
    ranks = rf"^.*{waiting} of 4 ha(?:s|ve) waited for (ranks? [\d, -]+) since"
    return re.findall(ranks + r".*\n  in .*\n  .*\n  cause: ([^.]+)\.", text, re.MULTILINE)


def test_the_ranks_and_the_causes(jobs):
    ended, folder = jobs[tuple(GO_ON)].result()
    assert ended.status == 0, str(ended)
    # The report that ends a fault counts. The fault may end while the next one is made.
    reports = hang_reports.first_reports(folder, f"ranks 0-1, 3 of 4 have waited for rank {CULPRIT}", "all_reduce ")
    found = [told(text)[0] for text in reports.values()]
    assert found == [(f"rank {CULPRIT}", each) for each in GO_ON.values()], str(ended)


def test_every_report_is_printed_once(jobs):
    ended, folder = jobs[tuple(GO_ON)].result()
    paths = list(folder.glob("hang-*"))
    assert len(paths) >= len(GO_ON)
    assert all(ended.output.count(f"This report is in {path}.") == 1 for path in paths), str(ended)
    assert ended.output.count("where all ranks are:") == len(paths)


def test_two_orders_of_two_communicators_and_the_end_of_a_job_that_hangs(jobs):
    ended, _ = jobs["order",].result()
    assert ended.status == 43, str(ended)
    assert (f"rank {CULPRIT}", END["order"]) in told(ended.output), str(ended)
    ended.shows("ends the job after")  # several ranks may say it: MPI_Abort may take seconds


@pytest.mark.parametrize("name", ["killed", "exits"])
def test_the_last_record_names_a_rank_that_is_gone(jobs, name):
    ended, folder = jobs[name,].result()
    assert ended.status, str(ended)
    if name == "exits":
        ended.shows(f"mpistrat run: rank {CULPRIT} (", "ended by os._exit(0) without telling the others; its last")
    (record,) = folder.glob("last-*.json")
    shown = subprocess.run(
        [sys.executable, "-m", "mpistrat", "top", "--last", record], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    # The launcher may have ended other ranks before they came to the call.
    assert (f"rank {CULPRIT}", END[name]) in told(shown.stdout, OTHERS), shown.stdout


LATE = """
import os, pathlib, sys, time
import hang_reports
import mpistrat
import mpistrat.integrations.hvd as hvd
from mpistrat.launch import launch
from mpistrat.process import mpi

rank, _ = launch.rank_and_size(os.environ)
folder = pathlib.Path(os.environ["MPISTRAT_RECORD_DIR"])


def late(text, start):
    def is_reported():
        return bool(hang_reports.first_reports(folder, "ranks 0, 2 of 3 have waited for rank 1", text))

    while rank == 1 and (sys.argv[1] == "never" or not is_reported()):
        time.sleep(1)
    return start()


# The ranks begin together: a rank that is late by the start of Python would be waited for, too.
(folder / f"here-{rank}").touch()
while len(list(folder.glob("here-*"))) < 3:
    time.sleep(0.05)
MPI = late("the start of MPI", mpi.start)
assert MPI.COMM_WORLD.Get_errhandler() == MPI.COMM_SELF.Get_errhandler() == MPI.ERRORS_RETURN
late("hvd.init()", hvd.init)
resolver = mpistrat.cluster_resolver.MpiClusterResolver
late("the start of a communicator", lambda: resolver(comm=MPI.COMM_WORLD))
with late("the start of an executor", lambda: mpistrat.coordinator.Executor(MPI.COMM_WORLD)):
    pass
try:
    import torch.distributed as dist
    import mpistrat.integrations.torch
except ImportError:
    print("without torch")
else:
    late("the start of a store of torch.distributed", lambda: dist.init_process_group("mpistrat"))
print(f"rank {rank} came to all", flush=True)
"""


@pytest.fixture
def late(run_ranks, tmp_path):
    def run(name, **environ):
        (tmp_path / "program.py").write_text(LATE)
        (tmp_path / "hang_reports.py").symlink_to(hang_reports.__file__)
        return run_ranks(
            3,
            "program.py",
            name,
            cwd=tmp_path,
            limit=250,
            MPISTRAT_HANG_SECONDS="1",
            MPISTRAT_RECORD_DIR=str(tmp_path),
            **environ,
        )

    return run


def test_a_rank_that_comes_late_to_what_ranks_do_first(late, tmp_path):
    """Before it has a record, what the system tells of it is all that is known."""
    ended = late("to all").check()
    starts = ["the start of MPI", "hvd.init()", "the start of a communicator", "the start of an executor"]
    if "without torch" not in ended.output:
        starts.append("the start of a store of torch.distributed")
    for each in starts:
        reports = hang_reports.first_reports(tmp_path, "ranks 0, 2 of 3 have waited for rank 1", each)
        named = rf" since .*\n  in {re.escape(each)} at .*program\.py.*\n  rank 1 .*\n  cause: "
        assert all(re.search(named, text) for text in reports.values()), f"{each} {ended}"
        assert reports, f"{each} {ended}"


def test_the_end_of_a_job_of_which_a_rank_does_not_start_mpi(late):
    ended = late("never", MPISTRAT_HANG_ABORT_SECONDS="10")  # after reports at 1, 2, 4 and 8 s
    assert ended.status in (43, 128 + signal.SIGKILL), str(ended)  # MPICH kills the others, and tells that
    ended.shows("waited for rank 1 since", "in the start of MPI at", "ends the job after")


SLOW = """
import os, pathlib, sys, time
import numpy as np
import mpistrat
errors = pathlib.Path("errors")
os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
strategy = mpistrat.MultiWorkerMirroredStrategy()
for step in range(2):
    if strategy.comm.rank == step:
        time.sleep(1.5)
        while sys.argv[1] == "reported" and f"waited for rank {step} since" not in errors.read_text():
            time.sleep(0.1)
    strategy.reduce("SUM", np.ones(3), axis=None)
if strategy.comm.rank == 0:
    print(errors.read_text())
"""


@pytest.mark.parametrize(("limit", "reports"), [("60", False), ("0.2", True)])
def test_slow_ranks_are_reported_beyond_the_limit_only(run_ranks, tmp_path, limit, reports):
    """Where no report can be written, it is printed alone, and the job goes on."""
    (tmp_path / "file").touch()
    (tmp_path / "program.py").write_text(SLOW)
    ended = run_ranks(
        2,
        "program.py",
        "reported" if reports else "silent",
        cwd=tmp_path,
        MPISTRAT_HANG_SECONDS=limit,
        MPISTRAT_RECORD_DIR=str(tmp_path / "file" / "below"),
    ).check()
    assert ("waited for rank" in ended.output) == reports, str(ended)
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
    assert len(named) == (who == "one") or sys.platform != "linux", str(ended)
    assert ended.output.startswith("mpistrat run: ") == (who == "one"), str(ended)


TORCH = """
import os, pathlib, time
import torch
import torch.distributed as dist
import mpistrat.integrations.torch

folder = pathlib.Path(os.environ["MPISTRAT_RECORD_DIR"])
dist.init_process_group("mpistrat")
while dist.get_rank() == 1 and not any("cause: sleep" in each.read_text() for each in folder.glob("hang-*")):
    time.sleep(3)
dist.all_reduce(torch.ones(3))
"""


def test_a_program_of_torch_alone(run_ranks, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "program.py").write_text(TORCH)
    ended = run_ranks(
        2, tmp_path / "program.py", limit=250, MPISTRAT_HANG_SECONDS="1", MPISTRAT_RECORD_DIR=str(tmp_path)
    ).check()
    named = (
        r"rank 0 of 2 has waited for rank 1 since.*\n  in all_reduce SUM float32\[3\].* at .*program\.py:11 in <module>"
        r".*\n.*\n  cause: sleep"
    )
    assert any(re.search(named, path.read_text()) for path in tmp_path.glob("hang-*")), str(ended)
