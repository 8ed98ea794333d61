"""Small work makes few Python calls, and a step as many for many variables as for few.

A call whose code has left the caches takes microseconds. The time would depend on the machine, the number does not.
"""

import gc
import os
import sys

import numpy as np
import pytest

import mpistrat
from mpistrat import record
from mpistrat.optimizers import SGD, Adam, AdamW

RECORD = os.path.dirname(record.__file__)


def python_calls(function):
    """Return the number of Python functions that a call enters when it is made again, without the flight record."""
    for _ in range(3):
        function()
    entered = []

    def count(frame, event, argument):
        if event == "call" and os.path.dirname(frame.f_code.co_filename) != RECORD:
            entered.append(frame.f_code.co_name)

    gc.disable()  # finalizers of what other tests have left would count
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(entered)


def step_of(strategy, optimizer, count):
    with strategy.scope():
        variables = [mpistrat.Variable(np.zeros((3, i % 5 + 1), np.float32)) for i in range(count)]
    gradients = [np.ones(variable.shape, np.float32) for variable in variables]

    def step():
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return lambda: strategy.run(step)


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize("make", [SGD, lambda: SGD(momentum=0.5), Adam, AdamW])
def test_a_step(strategy, make):
    few, many = (python_calls(step_of(strategy, make(), count)) for count in (6, 200))
    assert few == many
    assert few <= 12


def test_run(strategy):
    assert python_calls(lambda: strategy.run(abs, (-1,))) <= 4
    with strategy.scope():
        assert python_calls(lambda: strategy.run(abs, (-1,))) <= 4


def test_a_number(strategy):
    def reduce():
        return mpistrat.get_replica_context().all_reduce("SUM", 3)

    assert python_calls(lambda: strategy.run(reduce)) <= 12


@pytest.mark.parametrize("matrices", [False, True])
def test_a_list(strategy, matrices):
    def calls(count):
        arrays = [np.ones((i + 1, 2) if matrices and i % 2 else i + 1, np.float32) for i in range(count)]
        return python_calls(lambda: strategy.run(lambda: mpistrat.get_replica_context().all_reduce("SUM", arrays)))

    assert calls(6) == calls(60) <= 13


@pytest.mark.parametrize(
    ("transformed", "most"), [(lambda rows: rows, 6), (lambda rows: rows.map(lambda x, y: (x, y)), 20)]
)
def test_a_batch(strategy, transformed, most):
    rows = mpistrat.data.Dataset.from_arrays((np.ones((4096, 8), np.float32), np.arange(4096)))
    batches = iter(strategy.experimental_distribute_dataset(transformed(rows.shuffle(seed=0).batch(4))))
    for _ in range(40):  # until many are read at once
        next(batches)
    assert python_calls(lambda: next(batches)) <= most


def test_a_batch_as_an_argument(strategy):
    batch = np.ones((4, 3)), np.ones(4)
    assert python_calls(lambda: strategy.run(lambda batch: None, (batch,))) <= 5


def test_a_metric(strategy):
    with strategy.scope():
        mean = mpistrat.metrics.Mean()
    values = np.ones(8, np.float32)
    assert python_calls(lambda: strategy.run(mean.update_state, (values,))) <= 19


def test_a_variable_as_an_array(strategy):
    with strategy.scope():
        variable = mpistrat.Variable(np.zeros(3))
    assert python_calls(lambda: np.asarray(variable)) <= 3
