"""The benchmarks run alone, and write what they say they do."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from bench.test_bench import check_rows, launcher, run_program

__all__ = ["launcher"]  # a fixture

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROGRAMS, CALLS, ARRAYS = (FOLDER / room for room in ("programs", "asynchronous", "communication"))


@pytest.fixture
def beside(monkeypatch):
    """The folders of the benchmarks are some to import from."""
    for room in (PROGRAMS, CALLS, ARRAYS):
        monkeypatch.syspath_prepend(room)


STEPS = {"mpistrat", "mpistrat, plain arrays", "by hand", "by hand, 2 MiB pieces"}


@pytest.mark.full
@pytest.mark.mpich
@pytest.mark.parametrize(("n", "momentum"), [(1, None), (2, None), (2, "0.9")])
def test_step(run_alone, launcher, tmp_path, n, momentum):
    path = tmp_path / "rows.json"
    options = [] if momentum is None else ["--momentum", momentum]
    ended = run_program(run_alone, launcher, [PROGRAMS / "step.py"], path, "-n", str(n), "--repetitions", "2", *options)
    case = "sgd" if momentum is None else "sgd, momentum 0.9"
    rows = check_rows(path, "step", n, {case: STEPS})
    assert {row["bytes"] for row in rows} == {4 * 1_863_690}
    ended.shows(f"step, {n} rank{'s' * (n > 1)}\n", "mpistrat takes")


def test_step_under_a_launcher(run_ranks, tmp_path):
    """Then it measures those ranks, and launches none."""
    path = tmp_path / "rows.json"
    ended = run_ranks(3, PROGRAMS / "step.py", "--repetitions", "1", "--json", path, limit=100).check()
    check_rows(path, "step", 3, {"sgd": STEPS})
    assert ended.output.count("mpistrat takes") == 1


def test_difference_finds_each_parameter(beside):
    import step

    same = [np.ones(3), np.zeros((2, 2))]
    assert step.difference({"a": same, "b": [x + 1e-7 for x in same]}) is None
    assert "parameter 1 of b by up to 0.5" in step.difference({"a": same, "b": [same[0], same[1] + 0.5]})
    assert "parameter 0 of b" in step.difference({"a": same, "b": [same[0] * np.nan, same[1]]})


@pytest.mark.full
@pytest.mark.mpich
def test_startup(run_alone, launcher, tmp_path):
    path = tmp_path / "rows.json"
    run_program(run_alone, launcher, [PROGRAMS / "startup.py"], path, "--repetitions", "1")
    both = {"mpistrat", "by hand"}
    cases = ("launch to first all-reduce", "first line to first all-reduce", "memory")
    check_rows(path, "startup", 2, dict.fromkeys(cases, both))


def test_startup_says_what_a_launched_program_printed(run_alone, tmp_path):
    """Such as the error of a launcher that does not work."""
    program = tmp_path / "launcher.py"
    program.write_text("import sys; sys.exit('no such partition')")
    ended = run_alone(PROGRAMS / "startup.py", "--launcher", f"python3 {program} -n {{n}}")
    assert ended.status == 1
    ended.shows("ended with status 1, and 0 of 2 ranks came", "no such partition")


def test_startup_wants_no_launcher(run_ranks):
    ended = run_ranks(2, PROGRAMS / "startup.py")
    assert ended.status not in (0, None)
    ended.shows("call it without a launcher")


@pytest.mark.full
@pytest.mark.mpich
def test_closures(run_alone, launcher, tmp_path):
    path = tmp_path / "rows.json"
    run_program(run_alone, launcher, [CALLS / "closures.py"], path, "-n", "3", "--repetitions", "2", "--calls", "50")
    both = {"mpistrat", "MPICommExecutor", "ClusterCoordinator"}
    check_rows(path, "closures", 3, {"many calls, each": both, "one call and its result": both | {"Send and Recv"}})


def test_list_scheduling_is_that_of_a_clock(beside):
    """A clock that advances by one unit, and at each hands waiting tasks to workers that are free."""
    from farm import list_scheduling

    for workers, seconds in itertools.product((1, 2, 3, 7), ([4], [1, 5, 2, 2, 7, 1, 1], [3] * 10, [9, 1, 1, 1])):
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
    run_program(run_alone, launcher, [CALLS / "farm.py"], path, "-n", "3", "--repetitions", "1", "--tasks", "4")
    ways = {"mpistrat", "MPICommExecutor", "list scheduling, simulated"}
    check_rows(path, "farm", 3, {f"4 tasks, {case} ms": ways for case in ("5 to 500", "0.05 to 500")})


@pytest.mark.full
@pytest.mark.mpich
def test_variables(run_alone, launcher, tmp_path):
    path = tmp_path / "rows.json"
    run_program(run_alone, launcher, [ARRAYS / "variables.py"], path, "-n", "4", "--repetitions", "2", "--part", "40")
    check_rows(
        path,
        "variables",
        4,
        {
            "read, ResNet-50": {"mpistrat", "read_value of each", "copies in this rank", "into existing arrays"},
            "update, ResNet-50": {"mpistrat", "assign_add of each", "in this rank"},
        },
    )


def test_networks(beside):
    """The numbers of arrays and of parameters that are published."""
    from networks import NETWORKS

    assert [(len(shapes), sum(map(math.prod, shapes))) for shapes in (make() for make in NETWORKS.values())] == [
        (161, 25_557_032),
        (199, 109_482_240),
    ]
