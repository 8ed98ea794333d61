"""A suite that a launcher starts in each rank neither hides a failure nor hangs on it: small suites that go wrong."""

import re
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.fault
mpich = pytest.mark.mpich  # what a launcher makes of it

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_suite(run_ranks, tmp_path):
    """Run the text of a test file under n ranks."""

    def run(n, text, *options):
        test = tmp_path / "test_it.py"
        test.write_text("from hypothesis import given, strategies\nimport pytest\n" + textwrap.dedent(text))
        configuration = ["-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "no:cacheprovider"]
        return run_ranks(n, "-m", "pytest", test, "--color=no", *configuration, *options, limit=150)

    return run


def counts(ended):
    """The figures of the last line of each rank that reported."""
    return re.findall(r"^=+ (.*) in .* =+$", ended.output, re.MULTILINE)


def test_only_rank_0_reports(run_suite):
    ended = run_suite(3, "def test(comm): assert comm.size == 3").check()
    assert counts(ended) == ["1 passed"]
    assert ended.output.count("test session starts") == 1


def test_failure_everywhere_goes_on(run_suite):
    ended = run_suite(
        3,
        """
        def test_fails(comm):
            assert comm.rank > 10
        def test_passes(comm):
            comm.Barrier()
        """,
    )
    assert ended.status == 1, ended
    assert counts(ended) == ["1 failed, 1 passed"], ended
    for rank in range(3):
        ended.shows(f"failed on rank {rank} of 3", f"assert {rank} > 10")


@mpich
def test_failure_of_one_rank_is_shown_and_goes_on(run_suite):
    ended = run_suite(
        3,
        """
        def check(rank):
            print("said before")
            raise KeyError("lost", rank)
        def test_fails(comm):
            comm.Barrier()
            if comm.rank == 1:
                check(1)
        def test_passes(comm):
            comm.Barrier()
        """,
    )
    assert ended.status == 1, ended
    assert counts(ended) == ["1 failed, 1 passed"], ended
    ended.shows("passed on ranks 0, 2 of 3", "KeyError: ('lost', 1)", "test_it.py:6: KeyError", "said before")


@mpich
def test_failure_while_the_other_waits_ends_the_job(run_suite):
    ended = run_suite(
        2,
        """
        def test(comm):
            if comm.rank == 1:
                raise KeyError("lost", "x" * 200_000)
            comm.Barrier()
        """,
        "--ranks-patience=2",
    )
    assert ended.status not in (0, None), ended
    ended.shows("rank 1 of 2: failed: KeyError", "test_it.py::test, call", "x" * 200_000, "test_it.py:6: KeyError")


@pytest.mark.parametrize(("phase", "count"), [("setup", "1 failed, 2 passed"), ("teardown", "3 passed, 1 error")])
def test_failure_in_a_fixture_of_one_rank_is_shown_and_goes_on(run_suite, phase, count):
    ended = run_suite(
        2,
        f"""
        @pytest.fixture
        def resource(comm):
            yield from [None] * (comm.rank == 0 or "{phase}" == "teardown")
            if comm.rank == 1:
                raise OSError("no resource")
        def test_before(comm): pass
        def test(comm, resource):
            pass
        def test_after(comm):
            comm.Barrier()
        """,
    )
    assert ended.status == 1, ended
    assert counts(ended) == [count], ended
    ended.shows(f"failed in {phase} on rank 1 of 2", "OSError: no resource")


def test_failure_in_a_fixture_of_all_ranks_goes_on(run_suite):
    ended = run_suite(
        2,
        """
        @pytest.fixture
        def resource():
            raise OSError("no resource")
        def test_errs(resource): pass
        def test_passes(comm):
            comm.Barrier()
        """,
    )
    assert counts(ended) == ["1 passed, 1 error"], ended
    ended.shows("no resource")


def test_skip_on_one_rank_fails(run_suite):
    ended = run_suite(2, "def test(comm):\n    if comm.rank:\n        pytest.skip('not I')")
    assert counts(ended) == ["1 failed"], ended
    ended.shows("skipped on rank 1 of 2", "not I")


def test_a_suite_without_ranks_is_left_alone(run_suite):
    ended = run_suite(
        2,
        """
        import os
        from mpi4py import MPI
        RANK = MPI.COMM_WORLD.rank
        def test_skip():
            if RANK: pytest.skip("rank 0 only")
        if RANK:
            def test_of_rank_1(tmp_path): assert tmp_path.exists()
        """,
    ).check()
    assert sorted(counts(ended)) == ["1 passed", "1 passed, 1 skipped"], ended


def test_a_test_without_ranks_may_skip_on_one_rank(run_suite):
    ended = run_suite(
        2,
        """
        from mpi4py import MPI
        @pytest.mark.skipif(MPI.COMM_WORLD.rank > 0, reason="rank 0 only")
        def test_alone(tmp_path): pass
        def test(comm, tmp_path): assert comm.allgather(tmp_path) == [tmp_path] * 2
        """,
    ).check()
    assert counts(ended) == ["2 passed"], ended


def test_expected_failure_of_one_rank(run_suite):
    ended = run_suite(
        2,
        """
        @pytest.mark.xfail
        def test_call(comm): assert comm.rank == 0
        @pytest.fixture
        def resource(comm): assert comm.rank == 0
        @pytest.mark.xfail
        def test_setup(resource): pass
        """,
    ).check()
    assert counts(ended) == ["2 xfailed"], ended


@mpich
def test_hang_shows_every_stack(run_suite):
    ended = run_suite(
        2,
        """
        import time
        def rank_0_stands_here(comm):
            comm.Barrier()
        def rank_1_stands_here():
            time.sleep(1000)
        def test(comm):
            rank_1_stands_here() if comm.rank else rank_0_stands_here(comm)
        """,
        *("-o", "faulthandler_timeout=2", "--ranks-timeout=6"),
    )
    assert ended.status not in (0, None), ended
    for rank, line in enumerate((6, 8)):
        # Once from faulthandler, which needs no lock of the interpreter, and once with the rank's name.
        ended.shows(f"rank {rank} of 2: at test_it.py:{line} in rank_{rank}_stands_here after 6 s")
    assert ended.output.count("Timeout (0:00:02)!") == 2


@mpich
def test_different_collection_ends_the_run(run_suite):
    ended = run_suite(
        2,
        """
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            raise ImportError("only here")
        def test(comm): pass
        """,
    )
    assert ended.status == 2, ended
    ended.shows("did not collect the same tests", "only here")


ADDRESSES = """
    from mpi4py import MPI
    HANDLES = [10**12 + 1000 * i + MPI.COMM_WORLD.rank for i in range(3)]
    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("handle", HANDLES)
    def test(comm, handle):
        assert comm.allgather(handle - comm.rank) == 2 * [handle - comm.rank]
        assert handle != HANDLES[1]
"""


def test_parameters_may_be_addresses(run_suite):
    ended = run_suite(2, ADDRESSES)
    assert counts(ended) == ["1 failed, 2 passed"], ended
    ended.shows("test[1000000001000-ranks2]")


def test_property_fails_alike_on_every_rank(run_suite):
    ended = run_suite(
        2,
        """
        @given(x=strategies.integers(0, 1000))
        def test_fails(comm, x):
            assert comm.rank == 0 or x < 17
        @given(x=strategies.integers())
        def test_passes(comm, x):
            assert comm.allgather(x) == [x] * comm.size
        """,
        "--hypothesis-profile=default",
    )
    assert ended.status == 1, ended
    assert counts(ended) == ["1 failed, 1 passed"], ended
    ended.shows("failed on rank 1 of 2", "x=17")


def test_property_needs_equal_examples(run_suite):
    ended = run_suite(
        2,
        """
        from mpi4py import MPI
        @given(x=strategies.just(MPI.COMM_WORLD.rank))
        def test(comm, x): pass
        """,
    )
    assert ended.status == 1, ended
    ended.shows("The ranks drew different examples")


@pytest.mark.parametrize("mark", ["ranks(0)", "ranks('3')", "ranks(min=3, max=2)", "ranks(2, max=3)", "ranks(size=2)"])
def test_mark_that_is_not_of_numbers_is_an_error(run_suite, mark):
    ended = run_suite(1, f"@pytest.mark.{mark}\ndef test(): pass")
    assert ended.status not in (0, 1), ended
    ended.shows("are not numbers of ranks: write ranks(3)")


def test_ranks_mark_skips_and_says_so(run_suite):
    ended = run_suite(2, "@pytest.mark.ranks(min=3)\ndef test(): pass").check()
    ended.shows("for at least 3 ranks, this run has 2")


@mpich
def test_program_over_its_limit_is_stopped(run_ranks, tmp_path):
    (tmp_path / "sleeps.py").write_text("import time\nprint('started', flush=True)\ntime.sleep(1000)")
    ended = run_ranks(2, tmp_path / "sleeps.py", limit=8)
    assert ended.status is None
    ended.shows("started")
