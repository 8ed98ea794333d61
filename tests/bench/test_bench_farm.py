"""The measurement of a task farm runs, and its comparison is the time of list scheduling."""

import itertools

import pytest
from bench.test_bench import check_rows, launcher, run_subject

from mpistrat.bench.farm import CASES, list_scheduling

__all__ = ["launcher"]  # a fixture


def test_list_scheduling_is_that_of_a_clock():
    """A clock that advances by one unit, and at each hands waiting tasks to workers that are free."""
    for workers, seconds in itertools.product(
        (1, 2, 3, 7), ([4], [1, 5, 2, 2, 7, 1, 1], [3] * 10, [9, 1, 1, 1])
    ):
        waiting, left, clock = list(seconds), [0] * workers, 0
        while waiting or any(left):
            for i in range(workers):
                if not left[i] and waiting:
                    left[i] = waiting.pop(0)
            left = [max(0, each - 1) for each in left]
            clock += 1
        assert list_scheduling(seconds, workers) == clock


@pytest.mark.full
def test_farm(run_alone, launcher, tmp_path):
    path = tmp_path / "rows.json"
    run_subject(run_alone, launcher, "farm", path, "-n", "3", "--repetitions", "1", "--tasks", "4")
    ways = {"mpistrat", "MPICommExecutor", "list scheduling, simulated"}
    check_rows(path, "farm", 3, {f"4 tasks, {case}": ways for case in CASES})
