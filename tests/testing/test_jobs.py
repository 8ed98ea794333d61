"""Tests that ask for ranks where no launcher has started pytest: names, options, and markers of other plugins."""

import re
import sys
import textwrap
from pathlib import Path

import pytest


@pytest.fixture
def run_pytest(run_alone, tmp_path):
    """Run pytest on the text of a test file."""

    def run(text, *options):
        (tmp_path / "test_it.py").write_text("import pytest\n" + textwrap.dedent(text))
        return run_alone("-m", "pytest", "--strict-markers", "--ranks-timeout=30", *options, cwd=tmp_path)

    return run


SIZES = """
@pytest.mark.ranks(3)
def test_three(): pass
@pytest.mark.parametrize("x", ["a"])
@pytest.mark.ranks(1, 3)
def test_each(x): pass
@pytest.mark.ranks(min=2, max=4)
class TestRange:
    def test_range(self): pass
@pytest.mark.ranks
def test_any(): pass
def test_alone(): pass
@pytest.mark.parallel([1, 3])
def test_parallel(): pass
@pytest.mark.parallel([3])
def test_list(): pass
@pytest.mark.parallel(mode=3)
def test_of_another_plugin(): pass
@pytest.mark.mpi(min_size=2)
def test_mpi(): pass
"""


def test_names_show_the_number_of_ranks(run_pytest):
    ended = run_pytest(SIZES, "--collect-only", "-q", "--ranks=5").check()
    assert ended.output.split("\n\n")[0].splitlines() == [
        "test_it.py::test_three[ranks3]",
        "test_it.py::test_each[a-ranks1]",
        "test_it.py::test_each[a-ranks3]",
        "test_it.py::TestRange::test_range[ranks4]",
        "test_it.py::test_any[ranks5]",
        "test_it.py::test_alone",
        "test_it.py::test_parallel[nprocs=1]",
        "test_it.py::test_parallel[nprocs=3]",
        "test_it.py::test_list",
        "test_it.py::test_of_another_plugin",
        "test_it.py::test_mpi",
    ]


def test_a_session_without_ranks_loads_no_mpi(run_pytest):
    run_pytest(
        """
        import sys
        def test():
            assert not {"mpi4py", "h5py", "mpistrat.launch.launch", "mpistrat.testing.ranks_job"} & set(sys.modules)
        """,
        *("-p", "no:hypothesispytest", "-p", "no:zarr"),
    ).check()


def test_pdb_is_refused(run_pytest):
    ended = run_pytest("@pytest.mark.ranks(3)\ndef test(): pass", "--pdb")
    assert ended.status == 4, ended
    ended.shows("write breakpoint() in the test under `if comm.rank == 0:`, and start `mpistrat run -n 3 -m pytest -s")


SUITE = """
import warnings
pytestmark = pytest.mark.ranks(2)
@pytest.fixture(scope="module")
def made(comm):
    made = [comm.rank]
    yield made
    assert made == [comm.rank, "m", "n"]
class Test:
    def test_m(self, made): made.append("m")
    def test_n(self, made): made.append("n")
@pytest.mark.parametrize("i", range(3))
def test_some(comm, i):
    print("said by", comm.rank)
    assert i != 1
@pytest.mark.skip(reason="not today")
def test_skipped(): pass
@pytest.mark.xfail(strict=True)
def test_xfail(comm): assert comm.rank > 5
def test_tmp_path(comm, tmp_path, caplog, capsys):
    assert comm.allgather(tmp_path) == [tmp_path] * 2
    warnings.warn("careful")
@pytest.mark.usefixtures("comm")
def test_property(): pass
@pytest.mark.ranks(1)
def test_one(comm, strategy): assert strategy.num_replicas_in_sync == comm.size == 1
"""


@pytest.mark.core
@pytest.mark.mpich
def test_reports_are_those_of_normal_tests(run_pytest):
    ended = run_pytest(SUITE, "-rA", "--color=no")
    assert ended.status == 1, ended
    ended.shows(
        "1 failed, 7 passed, 1 skipped, 1 xfailed, 1 warning in ",
        "FAILED test_it.py::test_some[1-ranks2] - failed on rank 0 of 2: assert 1 != 1",
        "SKIPPED [1] test_it.py:17: not today",
        "XFAIL test_it.py::test_xfail[ranks2]",
        "UserWarning: careful",
        "said by 1",
        "PASSED test_it.py::test_one[ranks1]",
    )


@pytest.mark.full
def test_options_of_pytest(run_pytest):
    run_pytest(SUITE, "-x").shows("1 failed, 3 passed")
    run_pytest(SUITE, "--lf").shows("1 failed, 2 deselected")
    run_pytest(SUITE, "-s", "-k", "some and not 1-").shows("said by 0", "said by 1", "2 passed, 8 deselected")
    run_pytest(SUITE, "-n2", "--durations=2").shows("1 failed, 7 passed, 1 skipped, 1 xfailed")


@pytest.mark.full
def test_a_test_that_ends_too_late_fails_and_not_the_next_one(run_pytest):
    ended = run_pytest(
        """
        import time
        pytestmark = pytest.mark.ranks(2)
        def test_late(comm): time.sleep(3)
        @pytest.mark.timeout(timeout=50)
        def test_next(comm): time.sleep(3)
        """,
        "--ranks-timeout=2",
    )
    ended.shows("FAILED test_it.py::test_late[ranks2] - ranks 0, 1 of 2: at test_it.py:5", "1 failed, 1 passed")


@pytest.mark.full
def test_the_thread_of_pytest_timeout_gives_way_to_a_report_that_names_the_late_rank(run_pytest):
    ended = run_pytest(
        """
        import time
        pytestmark = pytest.mark.ranks(2)
        @pytest.mark.timeout(2, method="thread")
        def test_late(comm, rank):
            if rank == 1: time.sleep(99)
        @pytest.mark.timeout(2, method="thread", func_only=True)
        def test_function(comm): pass
        """
    )
    ended.shows(
        "rank 1 of 2: at test_it.py:7 in test_late after 2 s; rank 0 of 2: waits for the other ranks after 2 s",
        "1 failed, 1 passed",
    )


@pytest.mark.full
def test_the_teardown_after_the_last_test_of_a_session_that_stops_is_shown(run_pytest):
    ended = run_pytest(
        """
        @pytest.fixture(scope="module")
        def resource():
            yield
            raise OSError("still in use")
        @pytest.mark.ranks(1)
        def test_one(resource): pass
        @pytest.mark.ranks(2)
        def test_fails(resource): assert False
        @pytest.mark.ranks(1, 2)
        def test_next(resource): pass
        """,
        *("-x", "-p", "no:randomly"),
    )
    assert ended.status == 1, ended
    ended.shows(
        "ERROR test_it.py::test_one[ranks1] - OSError: still in use",
        "ERROR test_it.py::test_fails[ranks2] - OSError: still in use",
        "1 failed, 1 passed, 2 errors",
    )


@pytest.mark.full
@pytest.mark.parametrize("options", [(), ("-n2",)])
def test_coverage_of_ranks_is_combined(run_pytest, tmp_path, options):
    pytest.importorskip("pytest_cov")
    lines = [f"    if rank == {rank}: return\n    _ = {rank}" for rank in range(3)]
    (tmp_path / "measured.py").write_text("\n".join(["def run(rank):", *lines]))
    ended = run_pytest(
        """
        import measured
        @pytest.mark.ranks(3)
        def test(rank): measured.run(rank)
        """,
        *("--cov=measured", "--cov-report=term-missing", *options),
    ).check()
    assert re.search(r"measured.py +7 +1 +86% +7\n", ended.output), ended


@pytest.mark.full
def test_a_job_imports_and_writes_nothing_in_the_current_folder(run_alone, tmp_path):
    (tmp_path / "click.py").write_text("raise ImportError('of the current folder')")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        "import logging, pytest\n"
        "def test_alone(): logging.warning('said alone')\n"
        "@pytest.mark.ranks(2)\ndef test(): logging.warning('said by a rank')\n"
    )
    long = tmp_path / ("x" * 80)
    long.mkdir()
    pytest_program = Path(sys.executable).with_name("pytest")
    ended = run_alone(pytest_program, "tests", "--log-file=x.log", cwd=tmp_path, TMPDIR=str(long)).check()
    ended.shows("2 passed")
    assert "said alone" in (tmp_path / "x.log").read_text()


@pytest.mark.full
def test_parameters_may_be_addresses(run_pytest):
    ended = run_pytest(
        """
        import os
        HANDLES = [10**12 + 1000 * i + os.getpid() % 1000 for i in range(3)]
        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("handle", HANDLES)
        def test(comm, handle):
            assert len({*comm.allgather(handle // 1000)}) == 1
            assert handle != HANDLES[1]
        """
    )
    ended.shows("1 failed, 2 passed")


@pytest.mark.full
def test_an_error_of_the_import_in_all_ranks_is_shown(run_pytest):
    ended = run_pytest(
        """
        import sys
        if "mpi4py" in sys.modules: raise ImportError("no such library")
        @pytest.mark.ranks(2)
        def test(): pass
        @pytest.mark.parallel("threads")
        def test_of_another_plugin(): pass
        """
    )
    ended.shows("ranks 0, 1 of 2 did not collect this test", "ImportError: no such library", "1 failed, 1 passed")


@pytest.mark.full
def test_a_failure_of_a_teardown_shows_under_xdist(run_pytest):
    ended = run_pytest(
        """
        pytestmark = pytest.mark.ranks(2)
        @pytest.fixture(scope="class")
        def ran():
            yield (ran := [])
            assert 0 not in ran
        @pytest.mark.parametrize("i", range(4))
        class TestA:
            def test(self, ran, i): ran.append(i)
        @pytest.mark.parametrize("i", range(4))
        class TestB:
            def test(self, i): pass
        """,
        *("-n2", "-p", "no:randomly"),
    )
    assert ended.status == 1, ended
    ended.shows("8 passed, 1 error", "ERROR test_it.py::TestA::test[")


OTHERS = """
from mpi4py import MPI
SIZE = MPI.COMM_WORLD.size
@pytest.mark.mpi
def test_mpi(mpi_tmpdir): assert SIZE > 1
@pytest.mark.mpi(min_size=3)
def test_min(mpi_file_name): assert MPI.COMM_WORLD.allgather(mpi_file_name) == [mpi_file_name] * SIZE
@pytest.mark.mpi_skip
def test_skip(): assert SIZE == 1
@pytest.mark.mpi_xfail
def test_xfail(): assert SIZE == 1
@pytest.mark.mpi_break
def test_break(): assert SIZE == 1
@pytest.mark.parallel
def test_parallel(): assert SIZE == 3
@pytest.mark.parallel(nprocs=2)
def test_nprocs(): assert SIZE == 2
@pytest.mark.parallel([1, 3])
def test_each(): assert SIZE in (1, 3)
def test_alone(): pass
"""


@pytest.mark.full
def test_markers_of_other_plugins(run_pytest, run_ranks, tmp_path):
    if "pytest-mpi" in (ended := run_pytest(OTHERS)).output:
        pytest.skip("pytest-mpi is installed")
    ended.check().shows("10 passed")
    run_pytest(OTHERS, "-m", "parallel[3]").check().shows("3 passed, 7 deselected")
    run_ranks(3, "-m", "pytest", "-m", "parallel[match]", cwd=tmp_path).check().shows("4 passed, 5 deselected")
    run_pytest(OTHERS, "--only-mpi").check().shows("2 passed, 8 skipped")
    ended = run_ranks(3, "-m", "pytest", "--with-mpi", cwd=tmp_path).check()
    ended.shows("5 passed, 3 skipped, 1 xfailed")
