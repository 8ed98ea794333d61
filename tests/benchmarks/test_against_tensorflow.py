"""The comparison with TensorFlow's parameter servers runs, and the gradients written by hand are right."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "asynchronous"
TINY = ("--workers", "1", "--closures", "50", "--rounds", "1")
ROWS = ("steps/s", "empty closures/s", "schedule and fetch, ms")


@pytest.mark.full
def test_this_library_is_measured(run_alone):
    output = run_alone(FOLDER / "against_tensorflow.py", *TINY).check().output
    for row in ROWS:
        (found,) = re.findall(rf"^{row} +([\d,.]+)", output, re.MULTILINE)
        assert float(found.replace(",", "")) > 0


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tensorflow_is_measured(run_alone):
    output = run_alone(FOLDER / "against_tensorflow.py", *TINY, limit=120).check().output
    for row in ROWS:
        assert re.search(rf"^{row} +[\d,.]+ +[\d,.]+ +\d+\.\d\d$", output, re.MULTILINE), output


def test_gradients_are_differences_of_the_loss():
    spec = importlib.util.spec_from_file_location("perceptron", FOLDER / "perceptron.py")
    perceptron = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(perceptron)
    images, labels = (each[:7] for each in perceptron.synthetic_digits())
    weights = [each.astype(float) for each in perceptron.initial_weights()]
    _, gradients = perceptron.loss_and_gradients(weights, images, labels)
    rng = np.random.default_rng(0)
    for position, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.shape)
        losses = []
        for step in (1e-6, -1e-6):
            moved = list(weights)
            moved[position] = weights[position] + step * direction
            losses.append(perceptron.loss_and_gradients(moved, images, labels)[0])
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx((gradient * direction).sum(), rel=1e-5)
