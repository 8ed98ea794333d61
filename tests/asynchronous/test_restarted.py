"""A job that has lost a parameter server ends, and goes on from its file with another number of them."""

import os
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "restarted.py"
LOST, LIMIT = 6, 60  # the step before which the parameter server is lost; seconds
FROM_STEP_4 = "begins at step 4\n"


def goes_on(run_ranks, path, servers):
    run_ranks(2 + servers, PROGRAM, path, servers, limit=LIMIT).check().shows(
        FROM_STEP_4, "right after 12 steps"
    )


@pytest.mark.mpich
def test_a_file_brings_the_job_back_on_one_server(run_ranks, tmp_path):
    path = tmp_path / "state.h5"
    ended = run_ranks(4, PROGRAM, path, 2, LOST, limit=LIMIT)
    assert ended.status not in (0, None), str(ended)
    ended.shows("begins at step 0\n", "lost soon after")
    goes_on(run_ranks, path, 1)


@pytest.mark.skipif("MPISTRAT_TEST_LAUNCHER" in os.environ, reason="mpistrat run --ft starts the ranks")
def test_the_error_names_the_server_and_the_job_goes_on_with_three(run_alone, run_ranks, tmp_path):
    path, start = tmp_path / "state.h5", ("-m", "mpistrat", "run", "--ft")
    if run_alone(*start, "--dry-run", PROGRAM).status:
        pytest.skip("needs ULFM, which Open MPI 5 has")
    ended = run_alone(*start, "-n", "4", PROGRAM, path, 2, LOST, limit=LIMIT)
    assert ended.status not in (0, None), str(ended)
    ended.shows("begins at step 0\n", "LostRankError: rank 3 (ps 1) was lost", "rank 0 of 4 failed")
    goes_on(run_ranks, path, 3)
