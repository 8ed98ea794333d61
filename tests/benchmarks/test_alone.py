"""The benchmarks without rivals run, and write what they say they do."""

import itertools
import math
from pathlib import Path

import pytest
from bench.test_bench import check_rows, launcher, run_program

__all__ = ["launcher"]  # a fixture

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def beside(monkeypatch):
    """The folder of the benchmarks is one to import from."""
    monkeypatch.syspath_prepend(FOLDER)


@pytest.mark.full
@pytest.mark.mpich
def test_startup(run_alone, launcher, tmp_path):
    path = tmp_path / "rows.json"
    run_program(run_alone, launcher, [FOLDER / "startup.py"], path, "--repetitions", "1")
    both = {"mpistrat", "by hand"}
    cases = ("launch to first all-reduce", "first line to first all-reduce", "memory")
    check_rows(path, "startup", 2, dict.fromkeys(cases, both))


def test_startup_says_what_a_launched_program_printed(run_alone, tmp_path):
    """Such as the error of a launcher that does not work."""
    program = tmp_path / "launcher.py"
    program.write_text("import sys; sys.exit('no such partition')")
    ended = run_alone(FOLDER / "startup.py", "--launcher", f"python3 {program} -n {{n}}")
    assert ended.status == 1
    ended.shows("ended with status 1, and 0 of 2 ranks came", "no such partition")


def test_startup_wants_no_launcher(run_ranks):
    ended = run_ranks(2, FOLDER / "startup.py")
    assert ended.status not in (0, None)
    ended.shows("call it without a launcher")


@pytest.mark.full
@pytest.mark.mpich
def test_closures(run_alone, launcher, tmp_path):
    path = tmp_path / "rows.json"
    run_program(
        run_alone, launcher, [FOLDER / "closures.py"], path, "-n", "3", "--repetitions", "2", "--calls", "50"
    )
    both = {"mpistrat", "MPICommExecutor", "ClusterCoordinator"}
    check_rows(
        path,
        "closures",
        3,
        {"many calls, each": both, "one call and its result": both | {"Send and Recv"}},
    )


def test_list_scheduling_is_that_of_a_clock(beside):
    """A clock that advances by one unit, and at each hands waiting tasks to workers that are free."""
    from farm import list_scheduling

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
    run_program(
        run_alone, launcher, [FOLDER / "farm.py"], path, "-n", "3", "--repetitions", "1", "--tasks", "4"
    )
    ways = {"mpistrat", "MPICommExecutor", "list scheduling, simulated"}
    check_rows(path, "farm", 3, {f"4 tasks, {case} ms": ways for case in ("5 to 500", "0.05 to 500")})


@pytest.mark.full
@pytest.mark.mpich
def test_variables(run_alone, launcher, tmp_path):
    path = tmp_path / "rows.json"
    run_program(
        run_alone, launcher, [FOLDER / "variables.py"], path, "-n", "4", "--repetitions", "2", "--part", "40"
    )
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


def test_networks(beside):
    """The numbers of arrays and of parameters that are published."""
    from networks import NETWORKS

    assert [
        (len(shapes), sum(map(math.prod, shapes))) for shapes in (make() for make in NETWORKS.values())
    ] == [
        (161, 25_557_032),
        (199, 109_482_240),
    ]
