"""Jobs that save before they must end, come back, and compute what one run would have."""

import itertools
import json
from pathlib import Path

import pytest
from jobs import EXAMPLES, FARM_LIMITS, SLOW_STEPS, SLOW_WORDS, Job, run_here, unstuck, with_digits

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def undisturbed(digits, tmp_path_factory):
    """The loss of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_here(EXAMPLES / "resume_digits.py", *SLOW_WORDS[:-1], with_digits(folder / "out", digits))
    return result(folder)


def result(folder: Path) -> float:
    found = json.loads((folder / "out" / "result.json").read_text())
    assert found["steps"] == SLOW_STEPS
    return found["loss"]


def steps_of_starts(output):
    """At which step each run of the job started."""
    return [int(line.split()[-1]) for line in output.splitlines() if line.startswith("starts with step ")]


def check_resumed(start, loss):
    """One run that ended early, one that did the rest, and all came to the same as in one run."""
    job = unstuck(start, "its end", Job.is_over)
    output = job.ended()
    first, second = steps_of_starts(output)
    assert first == 0
    assert 0 < second < SLOW_STEPS
    assert f"all 3 ranks saved after run {second}" in output
    assert "the job was put back into the queue" in output
    assert result(job.folder) == pytest.approx(loss, rel=1e-9)


# With MPICH this one only: who counts the time, and what is left to do, is the same for each MPI.
@pytest.mark.mpich
def test_signal_by_hand(signalled, undisturbed):
    check_resumed(signalled, undisturbed)


def test_time_limit(limited, undisturbed):
    check_resumed(limited, undisturbed)


def test_farm_goes_on_after_time_limits(farm):
    """Each of 1,000 calls has one result; those that were running, or not yet written, ran again.

    A run is killed, so MPICH finds the memory that it has left: its name is that of the job and the step.
    """
    output = farm.ended(limit=600)
    assert "1000 results as in one process" in output
    assert farm.facts()["Restarts"] == str(FARM_LIMITS)
    runs = [
        [int(line) for line in (farm.folder / f"ran-{restart}").read_text().split()]
        for restart in range(FARM_LIMITS + 1)
    ]
    assert {*itertools.chain(*runs)} == {*range(1000)}
    for run in runs:
        assert len({*run}) == len(run)
    assert sum(map(len, runs)) <= 1000 + FARM_LIMITS * 20, [len(run) for run in runs]
