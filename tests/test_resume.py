"""Training that is interrupted, or killed, and started again ends as if nothing had happened."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest

KILLED = Path(__file__).with_name("data") / "killed_training.py"
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


def test_resumed_training_is_the_undisturbed_one(run_ranks, tmp_path):
    interrupted = tmp_path / "interrupted.py"
    interrupted.write_text(INTERRUPTED)
    options = ["--epochs", "5", "--dtype", "float64", "--out"]
    whole = run_ranks(3, EXAMPLES / "resume_digits.py", *options, tmp_path / "whole").check()
    whole.shows("starts with step 0", "after 60 steps")
    first = run_ranks(3, interrupted, *options, tmp_path / "parts", SLURM_JOB_ID="")
    first.shows("starts with step 0", "all 3 ranks saved after run 31")
    assert first.status == 42
    second = run_ranks(3, EXAMPLES / "resume_digits.py", *options, tmp_path / "parts").check()
    second.shows("starts with step 31", "after 60 steps")
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "parts")]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-12)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["data", "result.json", "weights.h5"]


@pytest.mark.fault
def test_a_killed_job_goes_on_with_other_ranks_and_the_rows_that_are_left(run_ranks, tmp_path):
    """Killed in the second of three epochs, and again in the third, by ranks that are 3, then 4, and 2 at the end."""
    lengths = (17, 40, 5, 31)
    for number, (first, rows) in enumerate(zip(np.cumsum((0, *lengths)), lengths, strict=False)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.arange(first, first + rows, dtype="f8")

    def hashes():
        return [hashlib.sha256(path.read_bytes()).digest() for path in sorted(tmp_path.glob("*.h5"))]

    def trained(ranks):
        """How often each row of each epoch was seen by a job, and in which step at the latest."""
        seen, steps = Counter(), {}
        for path in tmp_path.glob(f"run-{ranks}-*.log"):
            for epoch, step, row in (map(int, line.split()) for line in path.read_text().splitlines()):
                seen[epoch, row] += 1
                steps[epoch, row] = step
        return seen, steps

    before = hashes()
    counted, begun = Counter(), 0
    for ranks, kill in ((3, 16), (4, 27), (2, None)):
        ended = run_ranks(ranks, KILLED, tmp_path, *([] if kill is None else [str(kill)]))
        seen, steps = trained(ranks)
        saved = json.loads((tmp_path / "saved.json").read_text())
        if kill is not None:
            assert ended.status not in (0, None), str(ended)
            assert 0 < saved["input"]["position"] < sum(lengths)  # in the middle of an epoch
            assert begun < saved["step"] <= kill
            # What came after the last checkpoint is lost, and comes again.
            seen = Counter({each: count for each, count in seen.items() if steps[each] <= saved["step"]})
            assert saved["weight"] == sum(row * count for (_, row), count in (counted + seen).items())
        begun = saved["step"]
        counted += seen
    ended.check().shows(f"ends with {3 * sum(range(sum(lengths))):.1f}")
    assert counted == Counter({(epoch, row): 1 for epoch in range(3) for row in range(sum(lengths))})
    assert hashes() == before
