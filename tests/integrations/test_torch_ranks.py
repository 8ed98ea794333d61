"""Torch under several ranks: the tests of ``tests/ranks/integrations``, and programs that go wrong."""

import importlib.util
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

PROGRAMS = Path(__file__).with_name("torch_programs.py")
SUMMARY = re.compile(r"=+ (.*\d+ passed.* in .*?) =+")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.mpich), 3])
def test_ranks(n, run_ranks, summarize):
    arguments = ("-m", "pytest", "tests/ranks/integrations", "-p", "no:cacheprovider", "--color=no", "-m", "")
    ended = run_ranks(n, *arguments, limit=240).check()
    counts = [match[1] for line in ended.output.splitlines() if (match := SUMMARY.fullmatch(line))]
    summarize(f"torch, {n} rank{'s' * (n > 1)}: {counts[-1]}")


@pytest.mark.fault
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


@pytest.mark.fault
def test_what_is_left_at_the_end_does_not_keep_the_job(run_ranks):
    ended = run_ranks(2, PROGRAMS, "leaves_everything", limit=90).check()
    assert ended.output.count("at the end") == 2
