"""Programs on torch that go wrong, or leave something at their end."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

PROGRAMS = Path(__file__).with_name("torch_programs.py")


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("killed", ["signal 9"]),
        ("ends", ["the end of the program"]),
        ("receives_from_ended", ["from any rank", "came [1.0, 1.0, 1.0]", "rank 1", "has ended its program"]),
        (
            "asks_the_store_of_ended",
            ["came b'words'", "keys ['never set'] were not set before", "ended their programs: [1]"],
        ),
        ("counts_after_the_first", ["did not answer add('count') before", "ended their programs: [0]"]),
        ("late", ["TimeoutError", "rank 1 of 2 did not come within 1 s"]),
    ],
)
def test_jobs_that_go_wrong_end(name, texts, run_ranks):
    ended = run_ranks(2, PROGRAMS, name, limit=90)
    assert ended.status not in (0, None), str(ended)
    ended.shows(*texts)


def test_what_is_left_at_the_end_does_not_keep_the_job(run_ranks):
    ended = run_ranks(2, PROGRAMS, "leaves_everything", limit=90).check()
    assert ended.output.count("at the end") == 2
