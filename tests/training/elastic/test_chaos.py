"""Faults at random places, drawn from a seed: the job ends with the bits of a run without one, or is refused rightly.

No job hangs, and none leaves processes or copies. Each row is seen once in each epoch. By hand:
``MPISTRAT_TEST_LOSSES=500 python -m pytest tests/training/elastic/test_chaos.py -m ""``.
Each test has the number of its seed.
"""

import os

import numpy as np
import pytest

from tests.training.elastic.conftest import result

pytestmark = pytest.mark.fault
PLACES = ("start", "built", "restored", "step:{}", "end:{}", "copy:{}", "after")
STEPS = 18
LIMIT = 200  # seconds: only a job that hangs takes so long, on a busy machine too
# What ends a job, with its exit status.
ENDS = {"raise": 1, "exit": 3, "terminate": 143}


def drawn(seed):
    """Return a job: its ranks, the fault in each of its runs, options, variables, and the exit status."""
    rng = np.random.default_rng(seed)
    ranks, waits, status = int(rng.integers(1, 5)), rng.random() < 0.4, 0
    faults = []
    for _ in range(int(rng.integers(1, 3))):  # three losses at one step would be the program's fault
        how = str(
            rng.choice(["kill", "kill", "kill", "crash", "stop", "later", "flip", *["wait", "wait, next"] * waits])
        )
        places = ("step:{}", "end:{}") if "wait" in how else ("flip:{}",) if how == "flip" else PLACES
        place = str(rng.choice(places)).format(rng.integers(2, STEPS + 1))
        victims = "all" if rng.random() < 0.25 else sorted({*rng.integers(0, ranks, int(rng.integers(1, 3))).tolist()})
        how = f"later {rng.random() * 0.15:.3f}" if how == "later" else how
        faults.append((place, [0] if how == "flip" else victims, how))
    if rng.random() < 0.2:
        how = str(rng.choice([*ENDS]))
        faults, status = [(f"step:{rng.integers(2, STEPS)}", [0], how)], ENDS[how]
    environ = {"EVERY": str(rng.choice(["600", "0.01"]))}
    if rng.random() < 0.15 and not any(how == "flip" for _, _, how in faults):
        environ["MPISTRAT_ELASTIC_MEMORY"] = "100"
    options = ["--elastic", str(rng.choice(["same", "fewer"])), *["--standby"] * waits]
    return ranks, faults, options, environ, status


# The others take about five minutes.
few, many = range(2), range(2, int(os.environ.get("MPISTRAT_TEST_LOSSES", "60")))


@pytest.mark.mpich
@pytest.mark.parametrize("seed", [*few, *(pytest.param(seed, marks=pytest.mark.full) for seed in many)])
def test_the_bits_of_a_run_without_a_fault(run, seed, undisturbed):
    ranks, faults, options, environ, status = drawn(seed)
    ended = run(ranks, faults, *options, limit=LIMIT, **environ)
    if status == ENDS["terminate"] and ended.status == 0:
        status = 0  # the signal came when the last step had ended
    assert status == ended.status, f"{drawn(seed)}\n{ended}"
    if not status:
        assert result(ended) == undisturbed, drawn(seed)
