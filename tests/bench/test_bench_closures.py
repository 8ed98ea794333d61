"""The measurement of calls on other ranks runs, and writes what it says it does."""

import pytest
from bench.test_bench import check_rows, launcher, run_subject

__all__ = ["launcher"]  # a fixture


@pytest.mark.full
@pytest.mark.mpich
def test_closures(run_alone, launcher, tmp_path):
    path = tmp_path / "rows.json"
    run_subject(run_alone, launcher, "closures", path, "-n", "3", "--repetitions", "2", "--calls", "50")
    both = {"mpistrat", "MPICommExecutor", "ClusterCoordinator"}
    check_rows(
        path,
        "closures",
        3,
        {"many calls, each": both, "one call and its result": both | {"Send and Recv"}},
    )
