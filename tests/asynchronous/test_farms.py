"""Task farms do what executors of `concurrent.futures` do, and more: several ranks, time limits, statistics."""

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
