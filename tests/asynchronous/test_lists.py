"""Lists of variables on parameter servers."""

from pathlib import Path

import pytest


@pytest.mark.mpich
def test_lists_of_variables(run_ranks):
    ended = run_ranks(4, Path(__file__).with_name("lists.py"), limit=60, MPISTRAT_PROGRESS="1").check()
    ended.shows("all checks passed", "calls: ")  # the bar of a coordinator
