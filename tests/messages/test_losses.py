"""Under ULFM a job with roles goes on without lost workers, and ends if another rank is lost."""

import os
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif("MPISTRAT_TEST_LAUNCHER" in os.environ, reason="mpistrat run --ft starts the ranks"),
]

PROGRAMS = Path(__file__).with_name("losses.py")
LIMIT = 90
# What each program shows, and whether it succeeds.
CASES = {
    "workers": (True, ["counted 61 61", "joined the function cannot run: no worker is left;", *4 * ["fetched"]]),
    "server": (True, [*6 * ["raised rank 3 (ps 1) was lost: its process has died"], "[1.]"]),
    "server_unhandled": (False, ["rank 0 of 4 failed, which ends the job", "LostRankError: rank 2 (ps 0) was lost"]),
    "chief": (False, ["rank 0 (chief 0), the coordinator, was lost, so the job ends"]),
}


@pytest.fixture(scope="module")
def ended(two_at_a_time, run_alone):
    start = ("-m", "mpistrat", "run", "--ft")
    if run_alone(*start, "--dry-run", PROGRAMS).status:
        pytest.skip("needs ULFM, which Open MPI 5 has")

    def run(name):
        ranks = "7" if name == "workers" else "4"
        return run_alone(*start, "-n", ranks, PROGRAMS, name, limit=LIMIT)

    return two_at_a_time(run)


@pytest.mark.timeout(LIMIT * 4)
@pytest.mark.parametrize("name", CASES)
def test_losses(ended, name):
    succeeds, texts = CASES[name]
    job = ended[name].result()
    assert job.status is not None, str(job)
    assert (job.status == 0) == succeeds, str(job)
    for text in texts:
        assert job.output.count(text) >= texts.count(text), str(job)
