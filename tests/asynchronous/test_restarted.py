"""A job that has lost a parameter server ends, and goes on from its file with another number of them."""

import os
import shutil
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "restarted.py"
LOST, LIMIT = 6, 120  # the step before which the parameter server is lost; seconds


@pytest.mark.mpich
def test_a_file_brings_the_job_back_on_one_server_or_three(run_alone, run_ranks, tmp_path):
    path, start = tmp_path / "state.h5", ("-m", "mpistrat", "run", "--ft")
    if "MPISTRAT_TEST_LAUNCHER" in os.environ or run_alone(*start, "--dry-run", PROGRAM).status:
        ended = run_ranks(4, PROGRAM, path, 2, LOST, limit=LIMIT)  # the launcher ends all ranks
    else:
        ended = run_alone(*start, "-n", "4", PROGRAM, path, 2, LOST, limit=LIMIT)
        ended.shows("LostRankError: rank 3 (ps 1) was lost", "rank 0 of 4 failed")
    assert ended.status not in (0, None), str(ended)
    ended.shows("begins at step 0\n", "lost soon after")
    for servers in (1, 3):
        own = shutil.copy(path, tmp_path / f"{servers}.h5")
        again = run_ranks(2 + servers, PROGRAM, own, servers, limit=LIMIT)
        again.check().shows("begins at step 4\n", "right after 12 steps")
