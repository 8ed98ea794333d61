"""`mpistrat bench chaos` loses ranks of a program, and tells whether its result is the same."""

import pytest

pytestmark = [pytest.mark.full, pytest.mark.fault]

PROGRAM = """
import time
import numpy as np
import mpistrat
from mpistrat.data import Dataset
strategy = mpistrat.MultiWorkerMirroredStrategy(virtual_replicas=4)
with strategy.scope():
    total = mpistrat.Variable(np.zeros(3), name="total", aggregation=mpistrat.VariableAggregation.SUM)
x = np.random.default_rng(0).normal(size=(60, 3))
loop = mpistrat.experimental.ElasticLoop(Dataset.from_arrays(x).batch(8), 5, "copies", copy_share=1, total=total)
for batch in loop:
    strategy.run(lambda rows: total.assign_add(rows.sum(axis=0)), args=(batch,))
    time.sleep(0.02)
if strategy.comm.rank == 0:
    print("not the last line")
    print(total.numpy().tolist(), loop.step, {})
"""


@pytest.fixture
def chaos(run_alone, tmp_path):
    def run(program, *options):
        (tmp_path / "program.py").write_text(program)
        words = ["-m", "mpistrat", "bench", "chaos", *options, "program.py"]
        ended = run_alone(*words, limit=280, cwd=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["program.py"]
        return ended

    return run


@pytest.mark.parametrize("options", [("--losses=2",), ("--losses=1", "--fewer", "--standby")], ids=" ".join)
def test_a_program_that_goes_on(chaos, options):
    ended = chaos(PROGRAM.format(""), *options)
    assert ended.status == 0, ended
    ended.shows("without a loss: ", " 40'", ": the same, ", " in ")


def test_a_result_that_a_loss_changes(chaos):
    ended = chaos(PROGRAM.format("loop.restarts"), "--losses=1")
    assert ended.status == 1, ended
    ended.shows("exit status 0, last line '", "0 with the same last line")


@pytest.mark.parametrize(("program", "shown"), [("", "last line ''"), ("1 / 0", "ZeroDivisionError")])
def test_a_program_that_cannot_be_compared(chaos, program, shown):
    ended = chaos(program)
    assert ended.status == 1, ended
    ended.shows("nothing to compare", shown)
