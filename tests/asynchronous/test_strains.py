"""Much of one thing: a queue of limited length, large arrays, a parameter server without memory."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "strains.py"
LIMIT = 60


@pytest.mark.mpich
@pytest.mark.parametrize("arguments", [("queue", 5_000, 100), ("array", 0.02)], ids=["queue", "array"])
def test_it_works(run_ranks, arguments):
    run_ranks(3, PROGRAM, *arguments, limit=LIMIT).check().shows(f"{arguments[0]} passed")


@pytest.mark.mpich
@pytest.mark.fault
def test_a_server_without_memory(run_ranks):
    ended = run_ranks(3, PROGRAM, "no_memory", limit=LIMIT)
    assert ended.status not in (0, None), str(ended)
    ended.shows("refused", "on rank 2 (ps 0)", "rank 2 of 3 failed, which ends the job", "MemoryError")
