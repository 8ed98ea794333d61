"""Functions whose writes to variables count once, on a chief, a worker and two parameter servers."""

from pathlib import Path

import pytest


@pytest.mark.mpich
def test_writes_count_once(run_ranks):
    ended = run_ranks(4, Path(__file__).with_name("exactly_once.py")).check()
    assert ended.output.count("passed: ") == 3
