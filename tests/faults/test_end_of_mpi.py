"""Whether MPI is finalized by what started it, and what a strategy does afterwards."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.fault

PROGRAM = Path(__file__).with_name("end_of_mpi.py")


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", ["started", "one_level", "finalizes_itself"])
def test_library_that_started_mpi_finalizes_it(run_ranks, name, n):
    ended = run_ranks(n, PROGRAM, name).check()
    assert ended.output.count(f"sum {n}\n") == n
    assert "True" not in ended.output or name == "one_level"
    if name == "one_level":
        assert ended.output.count("level: True") == n


def test_program_that_finalizes_mpi_itself(run_ranks):
    ended = run_ranks(2, PROGRAM, "not_finalized").check()
    assert ended.output.count("finalized: False") == 2


@pytest.mark.mpich
@pytest.mark.parametrize("mpi", ["", "_with_own_mpi"])
@pytest.mark.parametrize(("name", "status"), [("one_raises", 1), ("one_exits", 7)])
@pytest.mark.parametrize("n", [2, 3])
def test_failure_ends_the_job_all_the_same(run_ranks, name, status, n, mpi):
    """Also that of a program which imports the package, and has started MPI itself."""
    ended = run_ranks(n, PROGRAM, name + mpi)
    assert ended.status == status, str(ended)
    assert ("ValueError: on purpose" in ended.output) == (name == "one_raises")


def test_forked_child_leaves_mpi_to_its_parent(run_ranks):
    ended = run_ranks(2, PROGRAM, "forks").check()
    assert ended.output.count("child: 0") == ended.output.count("sum 2") == 2
    assert ended.output.count("in a forked process: only those that MPI started may communicate") == 2


@pytest.mark.parametrize("n", [2, 3])
def test_forked_child_leaves_workers_to_its_parent(run_ranks, n):
    ended = run_ranks(n, PROGRAM, "coordinator_forks", limit=60).check()
    ended.shows("before 8", "child: 0", "after 16")


@pytest.mark.parametrize("n", [1, 2, 3])
def test_use_after_the_end_is_an_error(run_ranks, n):
    """A single replica goes on, where nothing is sent."""
    ended = run_ranks(n, PROGRAM, "after_finalize").check()
    assert ended.output.count("all calls were made") == n
    if n > 1:
        assert "no error" not in ended.output, str(ended)


def test_use_of_a_freed_communicator_is_an_error(run_ranks):
    ended = run_ranks(2, PROGRAM, "after_free").check()
    assert ended.output.count("refused: True") == 6
    assert ended.output.count("sum 2") == 2
