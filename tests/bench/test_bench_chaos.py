"""`mpistrat bench chaos` loses ranks of a program, and tells whether its result is the same."""

import re

import pytest

from mpistrat.bench import chaos as bench

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
        words = ["-m", "mpistrat", "bench", "chaos", *options, "program" if "-m" in options else "program.py"]
        ended = run_alone(*words, limit=280, cwd=tmp_path)
        assert not (tmp_path / "copies").exists()
        return ended

    return run


@pytest.mark.parametrize("options", [("--losses=2",), ("-m", "--losses=1", "--fewer", "--standby")], ids=" ".join)
def test_a_program_that_goes_on(chaos, options):
    ended = chaos(PROGRAM.format(""), *options)
    assert ended.status == 0, ended
    ended.shows("without a loss: ", " 40'", ": the same, ")
    assert re.search(r"\n[1-9]\d* losses in [1-9]", ended.output), ended


def test_a_result_that_a_loss_changes(chaos):
    ended = chaos(PROGRAM.format("loop.restarts"), "--losses=1")
    assert ended.status == 1, ended
    ended.shows("exit status 0, last line '")


def test_a_run_that_hangs_after_a_loss(monkeypatch, capsys, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.format("time.sleep(999 * (loop.restarts > 0))"))
    monkeypatch.setattr(bench, "_LATE_S", 0)
    assert bench.main(["--losses=1", "--seed=24", str(tmp_path / "program.py")]) == 1
    assert ": hangs, " in capsys.readouterr().out


@pytest.mark.parametrize(("program", "shown"), [("", "last line ''"), ("1 / 0", "ZeroDivisionError")])
def test_a_program_that_cannot_be_compared(chaos, program, shown):
    ended = chaos(program)
    assert ended.status == 1, ended
    ended.shows("nothing to compare", shown)
