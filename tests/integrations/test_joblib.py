"""Programs of joblib, scikit-learn and SciPy run on other ranks, and give their own results."""

from pathlib import Path

import pytest

pytest.importorskip("sklearn")


@pytest.mark.timeout(150)
def test_sweeps(run_ranks):
    program = Path(__file__).with_name("joblib_programs.py")
    run_ranks(3, program, limit=100).check().shows("all checks passed")
