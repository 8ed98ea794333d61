"""A signal handler that raises at a random moment of a random collective, which the program then repeats."""

import re
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("interrupts.py")
PLACES = Path(__file__).with_name("interrupted_places.py")
SEED = 1
LIMIT = 100

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(
        sys.version_info < (3, 11),
        reason="Python 3.10 serves signals also between the end of a call and the assignment of its result",
    ),
]


def played(run_ranks, n, ways, first, last):
    """The number of the draw that ended the job, or ``last``, and how the draws before it ended."""
    ended = run_ranks(n, PROGRAM, ways, SEED, first, last, limit=LIMIT)
    begun = [int(number) for number in re.findall(r"^draw (\d+): ", ended.output, re.MULTILINE)]
    results = re.findall(r"^(right|raised) (\d+)$", ended.output, re.MULTILINE)
    assert ended.status is not None, str(ended)  # no draw takes longer than its own limit
    assert "WRONG" not in ended.output, ended.output.partition("WRONG")[2]
    assert "Timeout (" not in ended.output, str(ended)
    if ended.status:
        assert ways == "any", str(ended)
        assert re.search(r"rank \d's call .* was interrupted by InterruptError", ended.output) or re.search(
            "was interrupted in wait", ended.output
        ), str(ended)
        return begun[-1], results
    return last, results


@pytest.mark.timeout(LIMIT * 5)
@pytest.mark.parametrize(
    ("n", "ways", "draws"),
    [pytest.param(2, "meeting", 80, marks=pytest.mark.mpich), (3, "meeting", 60), (2, "any", 15), (3, "any", 15)],
)
def test_right_sums_or_an_error_on_all_ranks(run_ranks, summarize, n, ways, draws):
    first, counts, interrupted, jobs = 0, {"right": 0, "raised": 0}, 0, 0
    while first < draws:
        last, results = played(run_ranks, n, ways, first, draws)
        for how, times in results:
            counts[how] += 1
            interrupted += int(times)
        jobs += 1
        first = last + 1
    summarize(
        f"{draws} draws on {n} ranks, {ways} ways: {counts['right']} right (interrupted {interrupted} times), "
        f"{counts['raised']} raised on all ranks, {jobs} jobs"
    )
    assert interrupted or counts["raised"] or jobs > 1  # each of them comes from an interruption


@pytest.mark.timeout(LIMIT * 5)
@pytest.mark.parametrize(("kind", "length"), [("reduce_to", 5), ("assign", 5), ("in_place", 5), ("reduce", 40_000)])
def test_at_each_place_right_results_or_an_error_on_all_ranks(run_ranks, summarize, kind, length):
    ended = run_ranks(2, PLACES, kind, length, limit=LIMIT * 4)  # each draw has a limit of its own
    assert "WRONG" not in ended.output, ended.output.partition("WRONG")[2]
    alone = re.findall(
        r"^rank [01] interrupted at (\d+) places, both raise after (\d+) of them$", ended.check().output, re.M
    )
    others = dict(re.findall(r"^(both interrupted|refused), rank 0 at (\d+) places$", ended.output, re.M))
    summarize(f"{kind} of {length}: {alone[0][0]} places of one rank, {others}")
    assert len(alone) == 2
    assert all(0 < int(raised) < int(places) for places, raised in alone)
    assert others.keys() == {"both interrupted"} | ({"refused"} if kind == "reduce_to" else set())
    assert all(int(places) > 50 for places in others.values())
