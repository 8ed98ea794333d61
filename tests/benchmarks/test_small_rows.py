"""The comparison of small rows runs: each program checks that it got every row."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "files" / "small_rows.py"


@pytest.mark.full
def test_small_rows(tmp_path, run_alone):
    ended = run_alone(PROGRAM, "--data", tmp_path, "--rows", "2000", "--repetitions", "1").check()
    ended.shows("contiguous, first", "gzip, 1/8", "arrays, in order")
