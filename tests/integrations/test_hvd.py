"""Programs with Horovod's calls that go wrong end with an error that says what happened."""

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("hvd_programs.py")


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("leaves", ["the end of the program", "named step"]),
        ("killed_in_join", ["signal 9"]),
        ("ends_without_join", ["the end of the program", "join"]),
    ],
)
def test_jobs_that_go_wrong_end(name, texts, run_ranks):
    ended = run_ranks(2, PROGRAMS, name, limit=60)
    assert ended.status not in (0, None), str(ended)
    ended.shows(*texts)
