"""Writes to variables on parameter servers: of lists by one message, and of functions that count once."""

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.mpich
def test_lists_of_variables(run_ranks):
    ended = run_ranks(4, PROGRAMS / "lists.py", limit=120, MPISTRAT_PROGRESS="1").check()
    ended.shows("all checks passed", "calls: ")  # the bar of a coordinator


@pytest.mark.mpich
def test_writes_count_once(run_ranks):
    ended = run_ranks(4, PROGRAMS / "exactly_once.py").check()
    assert ended.output.count("passed: ") == 4
