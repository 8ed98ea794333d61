"""Programs of a coordinator that are drawn: every call counts once, whoever is killed meanwhile."""

import os
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "drawn.py"


@pytest.mark.mpich
def test_programs(run_ranks):
    run_ranks(5, PROGRAM, 1, 30).check().shows("30 programs of seed 1 were right")


@pytest.mark.fault
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_programs_in_which_workers_are_killed(run_alone, seed):
    start = ("-m", "mpistrat", "run", "--ft")
    if "MPISTRAT_TEST_LAUNCHER" in os.environ or run_alone(*start, "--dry-run", PROGRAM).status:
        pytest.skip("this launcher ends all ranks when one is lost")
    ended = run_alone(*start, "-n", "6", PROGRAM, seed, 3, "kills").check()
    ended.shows(f"3 programs of seed {seed} were right")
    assert " 0 workers killed" not in ended.output
