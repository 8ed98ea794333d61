"""A rank that stands behind the call of the others: it has skipped the call, or has good reason to be there."""

import pytest
from monitor.records import record_of

from mpistrat.monitor import report, waits
from mpistrat.monitor.process import ProcessFacts
from mpistrat.monitor.stacks import Frame, Stacks
from mpistrat.monitor.view import JobView
from mpistrat.record.read import Entry

SOURCE = """\
strategy.barrier()
total = strategy.reduce(
    "SUM",
    numbers(),
    axis=None,
)
time.sleep(9)
with strategy.chief_first() as first:
    write()
"""


def record(rank, place, operation, number, inside):
    return record_of(rank, Entry(7, number, operation, place, 0, 5.0, 0.0, 0.0 if inside else 6.0))


@pytest.mark.parametrize(
    ("operation", "call", "before", "line", "cause"),
    [
        ("all_reduce SUM", 2, 1, 7, "skipped"),
        ("all_reduce SUM", 2, 1, 4, "sleep"),  # in an argument of the call
        ("chief_first 0", 8, 2, 9, "sleep"),  # the chief runs the block before the call
    ],
)
def test_a_rank_behind_the_call_of_the_others(tmp_path, operation, call, before, line, cause):
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    late = record(0, f"{file}:{before} in <module>", "barrier", 3, False)
    waiting = record(1, f"{file}:{call} in <module>", operation, 4, True)
    seen = JobView(
        9.0,
        (late, waiting),
        {late.key: ProcessFacts("S", "clock_nanosleep"), waiting.key: ProcessFacts("R")},
        {late.key: Stacks((Frame(str(file), line, "<module>"),))},
        frozenset(),
    )
    verdicts = report.judge(seen, waits.waits(seen.records, ()))
    assert verdicts[late.key].cause == cause


def test_without_the_source_no_rank_is_said_to_have_skipped_a_call():
    late = record(0, "gone.py:1 in <module>", "barrier", 3, False)
    waiting = record(1, "gone.py:2 in <module>", "all_reduce", 4, True)
    seen = JobView(
        9.0,
        (late, waiting),
        {late.key: ProcessFacts("S", "clock_nanosleep"), waiting.key: ProcessFacts("R")},
        {late.key: Stacks((Frame("gone.py", 7, "<module>"),))},
        frozenset(),
    )
    assert report.judge(seen, waits.waits(seen.records, ()))[late.key].cause == "sleep"
