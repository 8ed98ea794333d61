"""The rank that ended first, where the launcher has ended all others then."""

import pytest

from mpistrat.cli import top
from mpistrat.monitor import last, report
from mpistrat.monitor.last import End, EndedJob
from mpistrat.record.layout import Phase
from mpistrat.record.read import Entry, Membership, Record

SIZE = 4


def record(rank, inside, phase=Phase.USER_CODE, exit_status=None, kills=None):
    """A rank that was in the second collective, or on its way to it. The higher ranks lived longer."""
    entry = Entry(7, 1 + inside, "barrier", "train.py:1 in <module>", 0, 5.0, 0.0, 0.0 if inside else 6.0)
    return Record(
        host="node",
        out_of_memory_kills=kills,
        heartbeat=7.0 + rank,
        exit_status=exit_status,
        pid=1000 + rank,
        rank=rank,
        size=SIZE,
        phase=phase,
        memberships=(Membership(7, SIZE, rank, entry),),
        entries=(entry,),
    )


def job(inside, **of_rank_two):
    return tuple(record(rank, rank in inside, **(of_rank_two if rank == 2 else {})) for rank in range(SIZE))


def told(records, first, kills=None, by=""):
    """What the report says of causes."""
    ended = EndedJob(records, (), 20.0, End(first, by), kills)
    return "\n".join(report.causes(top.view_of(ended), last.waits_at_end(records, first)))


@pytest.mark.parametrize(
    ("order", "of_rank_two", "first"),
    [
        ((1002, 1000, 1003, 1001), {}, 2),
        ((1003, 1000, 1002, 1001), {}, 3),
        ((1002, 1000, 1003), {}, None),  # rank 1 was not found, and may have been the first
        ((1000, 1002, 1003, 1001), {"phase": Phase.FAILED}, None),  # it says so itself, and ended second
        ((1000, 1002, 1003, 1001), {"exit_status": 3}, None),
        ((1002, 1001, 1003, 1000), {"phase": Phase.FINISHED}, 1),
    ],
)
def test_the_first_of_an_order(order, of_rank_two, first):
    assert last.first_to_end(job((), **of_rank_two), order, SIZE) == first


@pytest.mark.parametrize("here", [(), (0, 1), (0, 1, 2)])
def test_a_rank_of_another_node_may_have_been_the_first(here):
    records = tuple(each for each in job(()) if each.rank in here)
    assert last.first_to_end(records, [each.pid for each in records], SIZE) is None


def test_of_two_missing_ranks_the_first_was_killed():
    text = told(job({0, 3}), 2)
    assert text.startswith("ranks 0, 3 of 4 have waited for rank 2 since")
    assert text.index("rank 2 (node") < text.index("rank 1 (node")
    assert "rank 2 (node process 1002): is gone: its process has ended. It was killed by a signal" in text
    assert "rank 1 (node process 1001): is gone: the launcher has ended it with the job, it seems, after rank 2" in text
    (only,) = last.unfinished(job({0, 3}), first=2)
    assert only.startswith("rank 2 (node, process 1002) ended without telling the others")


@pytest.mark.parametrize("of_rank_two", [{}, {"exit_status": 0}])
def test_a_rank_that_was_killed_in_the_call_of_all_ranks(of_rank_two):
    first = None if of_rank_two else 2
    assert told(job(range(SIZE), **of_rank_two), first).startswith("ranks 0-1, 3 of 4 have waited for rank 2 since")


def test_all_ranks_ended_in_one_call_and_the_first_is_not_known():
    text = told(job(range(SIZE)), None)
    assert "cause: unknown. All ranks were in this call when the job ended" in text


def test_a_rank_that_was_killed_before_others_waited_for_it():
    text = told(job(()), 2)
    assert text.startswith("rank 2 of 4 ended first, before other ranks waited for it\n")
    assert text.count("cause: killed.") == 1


@pytest.mark.parametrize("by", ["the call of MPI_Abort", "the signal SIGTERM"])
def test_a_job_that_was_ended_as_a_whole(by):
    text = told(job({0, 1, 3}), None, by=by)
    assert f"rank 2 (node process 1002): is gone: the launcher has ended it with the job, it seems, after {by}" in text
    assert text.count("cause: ended.") == 1


def test_several_ranks_that_may_have_ended_first():
    text = told(job({3}), None)
    assert "One of ranks 0-2 has ended first" in text
    assert "it is not known which one, and rank 0 gave the oldest sign of life" in text
    assert text.count("cause: killed.") == 1


@pytest.mark.parametrize(("first", "causes"), [(2, ["out of memory", "ended"]), (None, ["out of memory"])])
def test_only_the_first_was_killed_for_want_of_memory(first, causes):
    records = tuple(record(rank, rank in {0, 3}, kills=4) for rank in range(SIZE))
    text = told(records, first, kills=5)
    assert [line.split("cause: ")[1].split(".")[0] for line in text.split("\n") if "cause: " in line] == causes


def test_a_file_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RECORD_DIR", str(tmp_path))
    monkeypatch.setattr("mpistrat.launch.proc.out_of_memory_kills", lambda: 5)
    kept = last.load(last.keep(job({0, 3}), [], failed=True, end=End(2)))
    assert (kept.end, kept.out_of_memory_kills) == (End(2), 5)
