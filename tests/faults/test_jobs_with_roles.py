"""Whatever goes wrong in a job with roles, it ends, and says why."""

import os
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fault

PROGRAMS = Path(__file__).with_name("jobs_with_roles.py")
LIMIT = 100
# `mpistrat run` says it of Open MPI, which has this program.
OPEN_MPI = Path(sys.executable).with_name("ompi_info").exists() and "MPISTRAT_TEST_LAUNCHER" not in os.environ
WAY_TO_SURVIVE = ["with --ft (mpirun --with-ft ulfm) a coordinator goes on without a lost worker"] * OPEN_MPI
# What each program shows, and whether it succeeds.
CASES = {
    "chief_raises": (False, ["rank 0 of 4 failed, which ends the job", "ValueError: on purpose"]),
    "chief_fails_before_its_strategy": (False, ["rank 0 of 4 failed, which ends the job", "ValueError: on purpose"]),
    "chief_is_killed": (False, []),
    "worker_is_killed": (False, WAY_TO_SURVIVE),
    "server_is_killed": (False, []),
    "chief_is_interrupted": (False, ["rank 0 of 4 failed, which ends the job", "KeyboardInterrupt"]),
    "chief_leaves_without_join": (True, ["free 1", "free 2", "free 3"]),
    "worker_is_not_there": (False, ["not in Server.join() after 5 s: rank 2 (worker 1)"]),
    "worker_is_late": (True, ["goes on without: not in Server.join()", "free 1", "free 2", "free 3"]),
    "no_coordinator": (False, ["waited 1 s for the coordinator"]),
    "roles_differ": (True, [f"refused {rank} the ranks have different jobs" for rank in range(4)]),
    "more_servers_than_ranks": (True, [f"refused {rank} " for rank in range(4)]),
    "worker_is_its_own_chief": (False, ["worker 0 constructs ParameterServerStrategy", ").join() instead"]),
}


# How long the ranks of a program wait for each other, if that is not long.
SECONDS = {"worker_is_not_there": "5", "worker_is_late": "3", "no_coordinator": "1"}


@pytest.fixture(scope="module")
def ended(two_at_a_time, run_ranks):
    def start(name):
        return run_ranks(4, PROGRAMS, name, limit=LIMIT, MPISTRAT_CONTACT_SECONDS=SECONDS.get(name, str(LIMIT)))

    return two_at_a_time(start)


@pytest.mark.mpich
@pytest.mark.timeout(LIMIT * 4)
@pytest.mark.parametrize("name", CASES)
def test_the_job_ends(ended, name):
    succeeds, texts = CASES[name]
    job = ended[name].result()
    assert job.status is not None, str(job)
    assert (job.status == 0) == succeeds, str(job)
    job.shows(*texts)
