"""The measurement of variables on parameter servers runs, and writes what it says it does."""

import pytest
from bench.test_bench import check_rows, launcher, run_subject

__all__ = ["launcher"]  # a fixture


@pytest.mark.full
@pytest.mark.mpich
def test_variables(run_alone, launcher, tmp_path):
    path = tmp_path / "rows.json"
    run_subject(run_alone, launcher, "variables", path, "-n", "4", "--repetitions", "2", "--part", "40")
    check_rows(
        path,
        "variables",
        4,
        {
            "read, ResNet-50": {
                "mpistrat",
                "read_value of each",
                "copies in this rank",
                "into existing arrays",
            },
            "update, ResNet-50": {"mpistrat", "assign_add of each", "in this rank"},
        },
    )
