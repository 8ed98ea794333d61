"""How a job with a CentralStorageStrategy ends when one of its ranks fails."""

import pytest

pytestmark = [pytest.mark.fault, pytest.mark.mpich]

PROGRAM = """
import os, signal, sys
import numpy as np
import mpistrat

what = sys.argv[1]
strategy = mpistrat.experimental.CentralStorageStrategy()
rank, last = strategy.comm.rank, strategy.num_replicas_in_sync - 1
with strategy.scope():
    v = mpistrat.Variable(np.zeros(10_000), aggregation=mpistrat.VariableAggregation.SUM)


def fail(*_):
    raise ValueError("on purpose")


def half(copy):
    copy.assign(1.0 + copy.read_value())
    os.kill(os.getpid(), signal.SIGKILL)


def step():
    if what == "replica raises" and rank == last:
        fail()
    if what == "replica is killed" and rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    v.assign_add(np.ones(10_000))


strategy.run(lambda: v.assign_add(np.ones(10_000)))
if what == "update raises":
    strategy.extended.update(v, fail)
elif what == "update is killed":
    strategy.extended.update(v, half)
elif what == "one does not update":
    if rank != last:
        strategy.extended.update(v, lambda copy: copy.assign_add(np.ones(10_000)))
else:
    strategy.run(step)
print("at its end", flush=True)
"""


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("update raises", ["on purpose"]),
        ("update is killed", []),
        ("replica raises", ["ValueError: on purpose"]),
        ("replica is killed", []),
        ("one does not update", ["ranks 0-1: update Variable at", "rank 2: the end of the program"]),
    ],
)
def test_the_job_ends(run_ranks, tmp_path, what, texts):
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = run_ranks(3, tmp_path / "program.py", what, limit=100)
    assert ended.status not in (0, None), str(ended)
    assert ended.output.count("at its end") <= (what == "one does not update"), str(ended)
    ended.shows(*texts)
    if "killed" in what:
        assert ended.status == 128 + 9, str(ended)
