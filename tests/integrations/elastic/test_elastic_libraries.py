"""Programs of Keras and PyTorch that lose a rank within an epoch: they end with the bits of a run without a loss."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_program

HERE = Path(__file__).parent


def run(program, folder, *arguments, ranks=2, **environ):
    command = [sys.executable, "-m", "mpistrat", "run", "-n", str(ranks), "--elastic", HERE / program, folder]
    return run_program([*map(str, command), *arguments], 400, ROOT, OMP_NUM_THREADS="1", **environ)


def needs(*modules):
    for each in modules:
        if find_spec(each) is None:
            pytest.skip(f"{each} is not installed")


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("backend", "kind", "ranks", "losses"),
    [
        ("torch", "batches", 2, [("batch:1:2", [1])]),
        ("jax", "dataset", 2, [("end:0", [0])]),
        ("tensorflow", "arrays", 2, [("batch:2:4", [0, 1])]),
        pytest.param("torch", "arrays", 1, [("batch:0:0", [0]), ("epoch:2", [0])], marks=pytest.mark.full),
    ],
)
def test_fit_goes_on_within_an_epoch(tmp_path, backend, kind, ranks, losses):
    needs("keras", backend)
    environ = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = run("keras_program.py", tmp_path, kind, json.dumps(losses), ranks=ranks, **environ).check()
    ended.shows(f"run {len(losses)}: variables True, logs True", "from the copy of step")
    assert "ran out of data" not in ended.output


def test_what_cannot_go_on_within_an_epoch(tmp_path):
    needs("keras", "torch")
    ended = run("keras_program.py", tmp_path, "arrays", json.dumps([("refused", [])]), KERAS_BACKEND="torch").check()
    ended.shows(
        "copy_share must be above 0 and at most 1, not 2",
        "cannot go on within an epoch of a generator",
        "give fit no steps_per_epoch",
    )
    assert os.listdir(tmp_path) == []


def test_a_training_that_was_stopped_early_has_ended(tmp_path):
    needs("keras", "torch")
    ended = run("keras_program.py", tmp_path, "arrays", json.dumps([("stopped early", [])]), KERAS_BACKEND="torch")
    ended.check().shows("same True, epochs after the end 0")


@pytest.mark.timeout(420)
def test_modules_and_optimizers_of_torch(tmp_path):
    needs("torch")
    ended = run("torch_program.py", tmp_path, json.dumps([(2, [1]), (9, [0, 1])])).check()
    ended.shows("run 2: tensors True, rates True, steps 18", "from the copy of step 9")
