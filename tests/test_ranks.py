"""Starts ``tests/ranks`` under each number of ranks; under 2 in two launches, of which the core has the first.

Under 1 it leaves out what is marked `full`, whole tables of dtypes, algorithms and options: one rank sends no messages.
Under 4 it starts only what is marked `four_ranks`: four ranks on nodes meet what three do not, two nodes of two ranks
and nodes whose ranks are not neighbours. What needs another rank, but not a fourth, has met it with three.

To run one of them by hand: ``python -m mpistrat run -n 3 -m pytest tests/ranks -k name``.
``MPISTRAT_TEST_RANKS=2`` (or ``2,3``) leaves the other numbers of ranks out, and 2 alone is one launch.
"""

import os
import re

import pytest

SUMMARY = re.compile(r"=+ (.*\d+ (?:passed|failed|error).* in .*?) =+")
SIZES = [int(n) for n in os.environ.get("MPISTRAT_TEST_RANKS", "1,2,3,4").split(",")]
LIMIT = 1500  # seconds; a test that hangs is ended by its own limit long before


def launches():
    """The numbers of ranks, each with what is then selected."""
    for n in SIZES:
        if SIZES == [2]:
            yield pytest.param(2, "", marks=[pytest.mark.core, pytest.mark.mpich], id="2")
        elif n == 2:
            yield pytest.param(2, "not full", marks=[pytest.mark.core, pytest.mark.mpich], id="2-core")
            yield pytest.param(2, "full", id="2-rest")
        else:
            yield pytest.param(n, {1: "not full", 4: "four_ranks"}.get(n, ""), id=f"{n}")


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(("n", "selected"), list(launches()))
def test_ranks(n, selected, run_ranks, summarize):
    arguments = ("-m", "pytest", "tests/ranks", "-p", "no:cacheprovider", "--color=no", "-m", selected)
    arguments += ("--ranks-timeout=250",)  # several launches run at a time
    ended = run_ranks(n, *arguments, limit=LIMIT)
    lines = ended.output.splitlines()
    counts = [match[1] for line in lines if (match := SUMMARY.fullmatch(line))]
    summarize(f"{n} rank{'s' * (n > 1)}: {counts[-1] if counts else 'no summary'}")
    for line in lines:
        if line.startswith(("SKIPPED", "XFAIL", "XPASS")):
            summarize(f"    {line}")
    ended.check()
    assert len(counts) == 1, str(ended)
