"""``docs/examples/resume_digits.py``, interrupted and started again, ends as if nothing had happened."""

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"

# In its 31st step a rank sends itself the signal that Slurm would send.
INTERRUPTED = f"""
import os, signal, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import resume_digits
from resume_digits import digits
from mpi4py import MPI
inner, count = digits.loss_and_gradients, iter(range(10**6))
def step(*arguments):
    if next(count) == 30 and MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR2)
    return inner(*arguments)
digits.loss_and_gradients = step
resume_digits.train(resume_digits.parse())
"""


@pytest.mark.mpich
def test_resumed_training_is_the_undisturbed_one(run_ranks, tmp_path):
    interrupted = tmp_path / "interrupted.py"
    interrupted.write_text(INTERRUPTED)
    options = ["--epochs", "5", "--dtype", "float64", "--out"]
    whole = run_ranks(3, EXAMPLES / "resume_digits.py", *options, tmp_path / "whole").check()
    whole.shows("starts with step 0\n", "after 60 steps\n")
    first = run_ranks(3, interrupted, *options, tmp_path / "parts", SLURM_JOB_ID="")
    first.shows("starts with step 0\n", "all 3 ranks saved after run 31")
    assert first.status == 42
    second = run_ranks(3, EXAMPLES / "resume_digits.py", *options, tmp_path / "parts").check()
    second.shows("starts with step 31\n", "after 60 steps\n")
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "parts")]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-12)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == [
        "data",
        "result.json",
        "weights.h5",
    ]
