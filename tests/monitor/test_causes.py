"""The causes of a job that has ended: which rank has failed, and which ones the launcher has ended then."""

from pathlib import Path

import pytest

import mpistrat
from mpistrat.monitor import last, report, waits
from mpistrat.monitor.process import ProcessFacts, gone
from mpistrat.monitor.view import JobView
from mpistrat.record.layout import Phase
from mpistrat.record.read import Entry, Membership, Record

SIZE = 4


def record(rank, inside, phase=Phase.USER_CODE, exit_status=None):
    entry = Entry(7, 1 + inside, "barrier", "train.py:1 in <module>", 0, 5.0, 0.0, 0.0 if inside else 6.0)
    return Record(
        exit_status=exit_status,
        pid=1000 + rank,
        rank=rank,
        size=SIZE,
        phase=phase,
        memberships=(Membership(7, SIZE, rank, entry),),
        entries=(entry,),
    )


def job(**of_rank_two):
    """Ranks 0 and 3 wait, rank 1 was on its way, and rank 2 is what the arguments say."""
    return (record(0, True), record(1, False), record(2, False, **of_rank_two), record(3, True))


@pytest.mark.parametrize(
    ("of_rank_two", "causes"),
    [
        ({"phase": Phase.FAILED}, ["ended", "failed"]),
        ({"exit_status": 0}, ["ended", "exited"]),
        ({}, ["killed", "killed"]),
    ],
)
def test_the_ranks_that_a_launcher_has_ended(of_rank_two, causes):
    records = job(**of_rank_two)
    seen = JobView(9.0, records, {each.key: gone() for each in records}, {}, frozenset())
    verdicts = report.judge(seen, waits.waits(records, ()))
    assert [verdicts[each.key].cause for each in records[1:3]] == causes


def test_a_rank_that_is_gone_while_the_job_runs_was_not_ended_with_it():
    records = job(phase=Phase.FAILED)
    facts = {each.key: ProcessFacts("S") for each in records}
    facts[records[1].key] = gone()
    verdicts = report.judge(JobView(9.0, records, facts, {}, frozenset()), waits.waits(records, ()))
    assert verdicts[records[1].key].cause == "killed"


INSTALLED = """
import sys
sys.path.insert(0, sys.argv[1])
from mpistrat.monitor import causes, stacks
def line(file):
    return stacks.Frame(file, 7, "wait")
theirs = sys.argv[1] + "/solver/solve.py"
print(causes.user_frame(stacks.Stacks((line(causes.__file__), line(theirs)))).file == theirs, causes.__file__)
"""


def test_the_line_of_the_program_where_the_package_is_installed(run_alone, tmp_path):
    """Beside what else pip has installed, which may be where a program waits."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "mpistrat").symlink_to(Path(mpistrat.__file__).parent)
    run_alone("-c", INSTALLED, folder).check().shows(f"True {folder}")


@pytest.mark.parametrize(
    ("of_rank_two", "left", "starts"),
    [
        ({"exit_status": 3}, (), ["rank 2 "]),
        ({}, (2,), ["rank 2 "]),
        ({"phase": Phase.FAILED}, (), []),
        ({}, (), ["one of these: rank 1 ", "one of these: rank 2 "]),
    ],
)
def test_which_rank_has_left(of_rank_two, left, starts):
    texts = last.unfinished(job(**of_rank_two), left)
    assert [text[: len(start)] for text, start in zip(texts, starts, strict=True)] == starts
