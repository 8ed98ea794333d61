"""Much of one thing: a queue of limited length, large arrays, a parameter server without memory."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "strains.py"
LIMIT = 120


@pytest.mark.mpich
def test_a_little_of_each(run_ranks):
    run_ranks(3, PROGRAM, "little", limit=LIMIT).check().shows("little passed", "calls in", "GiB: created")


@pytest.mark.mpich
@pytest.mark.fault
def test_a_server_without_memory(run_ranks):
    ended = run_ranks(3, PROGRAM, "no_memory", limit=LIMIT)
    assert ended.status not in (0, None), str(ended)
    ended.shows("refused", "on rank 2 (ps 0)", "rank 2 of 3 failed, which ends the job", "MemoryError")


def test_strategies_that_are_dropped_leave_nothing(run_ranks):
    run_ranks(3, Path(__file__).parent / "programs" / "many_strategies.py", limit=200).check()
