"""Task farms do what executors of `concurrent.futures` do, and more: several ranks, time limits, statistics."""

import os
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs" / "farms.py"


@pytest.mark.mpich
@pytest.mark.parametrize("name", ["farm", "reads_with_a_time_limit"])
def test_program(run_ranks, name):
    run_ranks(4, PROGRAMS, name, limit=200).check().shows("all checks passed")


def test_one_worker(run_ranks):
    run_ranks(2, PROGRAMS, "one_worker").check().shows("all checks passed")


@pytest.mark.fault
def test_a_collective_that_waits_for_a_failed_rank_ends_the_job(run_ranks):
    ended = run_ranks(3, PROGRAMS, "stuck", MPISTRAT_CONTACT_SECONDS="0.5")
    assert ended.status not in (0, None), str(ended)
    ended.shows("ArithmeticError: on purpose", "still runs on rank 2 (worker 1)")


CRASH = """
import os, signal
from mpistrat.coordinator import Executor
def simulate(i):
    if i == 57:
        os.kill(os.getpid(), signal.SIGKILL)
    return i * i
with Executor(retries=2) as executor:
    if executor is not None:
        results = list(executor.map(simulate, range(100), on_error="keep"))
        assert [*results[:57], *results[58:]] == [i * i for i in range(100) if i != 57]
        print(f"call 57: {results[57]}", flush=True)
        assert executor.submit(simulate, 3).result() == 9
"""
# Quick calls, of which a worker has two at a time; the workers that die are not those of one call.
UNLUCKY = """
import os, signal, time
from mpistrat.coordinator import Executor
def simulate(i):
    if i in (100, 101) and not os.path.exists(f"died{i}"):
        open(f"died{i}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return i * i
with Executor() as executor:
    if executor is not None:
        assert list(executor.map(simulate, range(1000))) == [i * i for i in range(1000)]
        print("all calls ended", flush=True)
"""


@pytest.mark.fault
@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (CRASH, ("call 57: 3 workers were lost while they had this function", "it may be what ends them")),
        (UNLUCKY, ("all calls ended",)),
    ],
    ids=["its fault", "not its fault"],
)
def test_a_call_that_ends_its_worker_does_not_end_all(run_alone, tmp_path, code, shown):
    program, start = tmp_path / "program.py", ("-m", "mpistrat", "run", "--ft")
    program.write_text(code)
    if "MPISTRAT_TEST_LAUNCHER" in os.environ or run_alone(*start, "--dry-run", program).status:
        pytest.skip("this launcher ends all ranks when one is lost")
    run_alone(*start, "-n", "6", program, cwd=tmp_path).check().shows(*shown)
