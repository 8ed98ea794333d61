"""What becomes of a job when one of its programs goes wrong."""

import concurrent.futures
import errno
import fcntl
import os
import re
import time
from pathlib import Path

import pytest

from mpistrat.process import failure

pytestmark = pytest.mark.fault
mpich = pytest.mark.mpich

LIMIT = 100
BUSY = {"many_communicators": 250}  # its limit: computes all the time, so runs alone
PROGRAMS = Path(__file__).with_name("programs.py")


@pytest.fixture(scope="module")
def ahead(request, run_ranks):
    """The programs that are the parameter ``name`` of a test, by name and number of ranks.

    Two run at a time, because starting and ending a job is mostly waiting, in the order of the tests.
    """
    specs = [item.callspec for item in request.session.items if hasattr(item, "callspec") and item.path == request.path]
    jobs = [(spec.params["name"], spec.params.get("n", 2)) for spec in specs if "name" in spec.params]
    pool = concurrent.futures.ThreadPoolExecutor(2)
    yield {(name, n): pool.submit(timed, run_ranks, n, name) for name, n in jobs if name not in BUSY}
    pool.shutdown(cancel_futures=True)


def timed(run_ranks, n, name, *words):
    """How the program ended, and when."""
    return run_ranks(n, PROGRAMS, name, *words, limit=BUSY.get(name, LIMIT)), time.time()


@pytest.fixture
def run(ahead, run_ranks, summarize):
    """Run a program; if it told when it went wrong, record how long the job took to end."""

    def run(name, n=2, words=()):
        job = None if words else ahead.get((name, n))
        ended, end = timed(run_ranks, n, name, *words) if job is None else job.result()
        told = [float(text) for text in re.findall(r"^at (\d+\.\d+)$", ended.output, re.MULTILINE)]
        if told and ended.status is not None:
            summarize(f"{name} on {n} ranks: the job ended {end - max(told):.1f} s after it went wrong")
        assert ended.status is not None, str(ended)
        return ended

    return run


def failed(ended, *texts, tracebacks=1):
    """It failed, says why in that many tracebacks, and Python says nothing afterwards."""
    assert ended.status not in (0, None), str(ended)
    ended.shows(*texts)
    assert ended.output.count("Traceback (most recent call last)") == tracebacks, str(ended)
    if tracebacks:
        after = ended.output.rsplit("Traceback (most recent call last)", 1)[1]
        for text in ("Exception ignored", "Fatal Python error", "Segmentation fault", "Error in atexit"):
            assert text not in after, str(ended)
    return ended


RAISING = [
    "one_raises",
    "raises_in_run",
    "raises_in_merge_call",
    "raises_in_scope",
    "raises_in_update",
    "thread_stays_alive",
]


@pytest.mark.parametrize("n", [pytest.param(2, marks=mpich), 3])
@pytest.mark.parametrize("name", RAISING)
def test_error_of_one_rank_ends_the_job(run, name, n):
    ended = failed(run(name, n), "ValueError: on purpose", f"rank {n - 1} of {n} failed", f"in {name}")
    assert ended.output.count("ValueError: on purpose") == 1, str(ended)
    after = ended.output.split("ValueError: on purpose\n", 1)[1]
    assert not re.search(r"python|\.py\b", after), str(ended)


@mpich
def test_exit_handlers_of_the_rank_that_failed_are_served(run):
    failed(run("one_raises"), "atexit of rank 1")


@pytest.mark.parametrize("n", [pytest.param(2, marks=mpich), 3])
def test_error_of_all_ranks_is_shown_once(run, n):
    failed(run("all_raise", n), "ValueError: on purpose")


@mpich
def test_error_with_a_huge_message_is_shown_whole(run):
    ended = failed(run("huge_message"))
    assert "begin" + "x" * 300_000 + "end" in ended.output


def test_interrupt(run):
    failed(run("raises_an_interrupt"), "KeyboardInterrupt")


@mpich
def test_chief_that_fails_while_others_wait(run):
    failed(run("chief_fails_first"), "no data")


@pytest.mark.parametrize("name", ["own_hook_before", "own_hook_after"])
def test_own_hook(run, name):
    ended = run(name)
    assert ended.status != 0, str(ended)
    assert ended.output.count("own hook: on purpose") == 1, str(ended)


def test_own_hook_that_fails(run):
    ended = run("own_hook_that_fails")
    assert ended.status != 0, str(ended)
    ended.shows("of the hook")


def test_interactive_sessions_are_left_alone(run):
    ended = run("interactive", words=("ps1",))
    ended.shows("ValueError: on purpose")
    assert "which ends the job" not in ended.output, str(ended)


# --- ends without an error -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        pytest.param("exit_3", 3, None, marks=mpich),
        ("raise_exit_3", 3, None),
        ("exit_from_a_derived_class", 4, None),
        pytest.param("exit_text", 1, "this is the text", marks=mpich),
        ("exit_true", 1, None),
        ("exit_object", 1, "['a', 'list']"),
        pytest.param("exit_256", None, None, marks=mpich),
        ("exit_huge", None, None),
        pytest.param("ends_at_once", 5, None, marks=mpich),
        pytest.param("killed", None, None, marks=mpich),
    ],
)
def test_exit_of_one_rank_ends_the_job(run, name, status, text):
    ended = run(name)
    # Python 3.12 and later themselves complain of a number that does not fit.
    complaints = ended.output.count("Exception ignored on threading shutdown") if name == "exit_huge" else 0
    failed(ended, tracebacks=complaints)
    if status is not None:
        assert ended.status == status, str(ended)
    if text is not None:
        assert ended.output.count(text) == 1, str(ended)


@mpich
def test_exit_that_is_caught_is_no_exit(run):
    ended = run("caught_exit").check()
    assert ended.output.count("all is well") == 2


@pytest.mark.parametrize("n", [pytest.param(2, marks=mpich), 3])
@pytest.mark.parametrize("name", ["ends_early", "returns_early", "returns_early_on_a_part"])
def test_rank_that_ends_while_others_wait(run, name, n):
    ended = run(name, n)
    ended.shows("MismatchError")
    if name != "returns_early_on_a_part":  # of a part, no other rank is asked who shows the traceback
        failed(ended)
    rank = 0 if name == "returns_early_on_a_part" else n - 1  # of the strategy's communicator
    assert re.search(rf"rank {rank}: the end of the program", ended.output), str(ended)


@pytest.mark.parametrize("n", [pytest.param(3, marks=mpich), 4])
@pytest.mark.parametrize("name", ["leaves_a_reduction_between_nodes", "leaves_a_small_reduction_between_nodes"])
def test_rank_that_leaves_others_in_the_middle(run, name, n):
    ended = failed(run(name, n), "after a MemoryError in the middle", f"rank {n - 1}'s call all_reduce", tracebacks=0)
    assert "the others would wait for ever" in ended.output


@pytest.mark.parametrize(
    ("name", "what"),
    [
        pytest.param("leaves_a_reduction_by_mpi", "all_reduce", marks=mpich),
        ("leaves_a_reduction_by_mpi_between_nodes", "all_reduce"),
        ("leaves_an_ordered_reduction_between_nodes", "all_reduce"),
        ("leaves_an_exact_reduction_between_nodes", "all_reduce"),
        pytest.param("leaves_a_gather", "all_gather", marks=mpich),
    ],
)
def test_rank_that_leaves_the_other_in_mpi(run, name, what):
    ended = failed(run(name), "after a MemoryError in the middle", f"rank 1's call {what}", tracebacks=0)
    assert "the others would wait for ever" in ended.output


def test_rank_that_leaves_a_barrier(run):
    """It can tell the other one, where it stands then."""
    failed(run("leaves_a_barrier"), "MismatchError", "rank 1's call barrier", "was interrupted by MemoryError")


# --- ranks that disagree -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("different_collectives", ("MismatchError", "rank 0: all_reduce", "rank 1: all_gather")),
        ("different_shapes", ("ValueMismatchError", "rank 0: all_reduce", "float32[3]", "float32[4]")),
        ("different_dtypes", ("ValueMismatchError", "rank 0: all_reduce", "float32[3]", "float64[3]")),
        ("different_ops", ("ValueMismatchError", "rank 0: all_reduce SUM", "rank 1: all_reduce MEAN")),
    ],
)
def test_disagreement_ends_the_job(run, name, texts):
    failed(run(name), *texts, "programs.py:")


def test_error_that_is_caught_and_agreed_on(run):
    ended = run("caught_and_agreed", 3).check()
    assert ended.output.count("stopped at 2") == 3, str(ended)


def test_who_waits_hears_of_the_end_of_a_rank_that_gave_up(run):
    failed(run("time_out_is_caught_and_the_program_ends"), "MismatchError: rank 1", "rank 0: the end of the program")


def test_ranks_that_gave_up_end_without_error(run):
    ended = run("time_outs_are_caught_and_the_programs_end", 3).check()
    assert ended.output.count("was patient") == 3, str(ended)


@mpich
def test_rank_that_gave_up_an_asynchronous_reduction_ends_without_error(run):
    run("asynchronous_time_out_is_caught_and_the_programs_end").check().shows("rank 0 was patient", "the sum is 2.0")


def test_chief_that_fails_is_known_to_all(run):
    ended = run("chief_fails_and_all_know", 3).check()
    ended.shows("rank 0 ValueError no data")
    for rank in (1, 2):
        assert re.search(rf"rank {rank} RuntimeError .*no data", ended.output), str(ended)


@mpich
def test_two_threads(run):
    ended = run("two_threads").check()
    ended.shows("refused:", "another thread")
    assert ended.output.count("all is well") == 2


def test_error_of_a_thread_is_left_to_python(run):
    ended = run("thread_raises").check()
    assert ended.output.count("all is well") == 2
    ended.shows("ValueError: on purpose")


# --- shared memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=mpich), 3])
def test_views_of_buffers_outlive_mpi(run, n):
    ended = run("buffers_at_exit", n).check()
    assert ended.output.count(f"view holds {n + 1}") == n, str(ended)
    assert ended.output.count("left behind []") == (n if n > 1 else 0), str(ended)


@mpich
def test_nothing_stays_in_shared_memory_of_a_killed_rank(run):
    ended = run("buffers_of_a_killed_rank")
    assert ended.status not in (0, None)
    assert ended.output.count("left behind []") == 2, str(ended)


@mpich
def test_memory_does_not_grow(run):
    ended = run("memory_does_not_grow").check()
    assert ended.output.count("all is well []") == 2, str(ended)


def test_call_sites_are_compared_when_asked_for(run_ranks):
    program = (PROGRAMS, "different_places")
    run_ranks(2, *program, limit=LIMIT).check()
    ended = run_ranks(2, *program, limit=LIMIT, MPISTRAT_DEBUG="collectives")
    lines = PROGRAMS.read_text().splitlines()
    first = lines.index("    if RANK:", lines.index("def different_places():")) + 2
    assert ended.status not in (0, None)
    ended.shows("do not fit together", f"number 4 at {PROGRAMS}:{first}", f"number 4 at {PROGRAMS}:{first + 2}")


# --- communicators -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n"),
    [
        pytest.param("many_communicators", 1, marks=mpich),
        pytest.param("many_communicators", 3, marks=mpich),
        ("alone_first", 1),
        pytest.param("alone_first", 2, marks=mpich),
        ("alone_first", 3),
    ],
)
def test_communicators(run, name, n):
    ended = run(name, n).check()
    assert ended.output.count("all is well") == n


def test_a_rank_that_cannot_open_the_others_file(run):
    ended = run("a_rank_that_opens_no_file").check()
    assert ended.output.count("all is well") == 2


@mpich
def test_freed_communicator(run):
    ended = run("frees_the_communicator").check()
    assert ended.output.count("all is well") == 2
    ended.shows("RuntimeError:", "MirroredVariable 'Variable'")
    assert re.search("RuntimeError: .*(freed|communicator)", ended.output), str(ended)


@mpich
def test_use_of_a_freed_communicator_ends_the_job(run):
    failed(run("frees_while_others_wait"))


@mpich
def test_null_communicator(run):
    failed(run("null_communicator", 3), "ValueError", "COMM_NULL")


@mpich
def test_one_traceback_although_each_rank_was_alone_before(run):
    failed(run("alone_first_then_all_raise", 3), "ValueError: on purpose")


@mpich
def test_finalized(run):
    ended = run("finalized").check()
    assert ended.output.count("RuntimeError: MPI was finalized") == 2, str(ended)


# --- who reports ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def not_failed():
    yield
    failure.first_failure.cache_clear()


def test_a_file_system_without_locks_does_not_silence_all_ranks(monkeypatch, tmp_path):
    """Network file systems may refuse a lock: two tracebacks are better than none."""

    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    with (tmp_path / "claim").open("wb") as file:
        monkeypatch.setattr(failure, "_claim", file.fileno())
        monkeypatch.setattr(fcntl, "flock", refuse)
        assert failure.first_failure()


def test_a_full_disk_does_not_silence_all_ranks(monkeypatch, tmp_path):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "claim").write_bytes(b"not claimed")
    with (tmp_path / "claim").open("r+b") as file:
        monkeypatch.setattr(failure, "_claim", file.fileno())
        monkeypatch.setattr(os, "ftruncate", refuse)
        assert failure.first_failure()


def test_the_first_of_two_reports(monkeypatch, tmp_path):
    (tmp_path / "claim").write_bytes(b"not claimed")
    with (tmp_path / "claim").open("r+b") as file, (tmp_path / "claim").open("r+b") as other:
        monkeypatch.setattr(failure, "_claim", file.fileno())
        assert failure.first_failure()
        failure.first_failure.cache_clear()  # as in another rank
        monkeypatch.setattr(failure, "_claim", other.fileno())
        assert not failure.first_failure()
