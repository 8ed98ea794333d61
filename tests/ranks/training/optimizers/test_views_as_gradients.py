"""Gradients that are views of variables have the values from before the step, whatever the step changes first."""

import itertools

import numpy as np
import pytest

import mpistrat
from mpistrat.optimizers import LARS, SGD, Adam
from mpistrat.values import IndexedSlices, component

SIZES = {"small": (4, 6), "both": (4, 40_000, 2)}
MAKE = {
    "decay": lambda: SGD(0.5, weight_decay=0.25),
    "adam": lambda: Adam(0.5, weight_decay=0.25),
    "separate": lambda: LARS(0.5),
    "clipped": lambda: SGD(0.5, weight_decay=0.25, clipvalue=0.75),
}


def stepped(strategy, optimizer, variables, gradients, aggregate):
    """Return the variables after two steps."""
    for _ in range(2):
        strategy.run(
            lambda: optimizer.apply_gradients(
                zip(gradients(), variables, strict=True), experimental_aggregate_gradients=aggregate
            )
        )
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize(
    ("kind", "make", "sizes"),
    [
        *[(mpistrat.MultiWorkerMirroredStrategy, *each) for each in itertools.product(MAKE, SIZES)],
        (mpistrat.experimental.CentralStorageStrategy, "decay", "both"),
    ],
)
def test_views_of_variables(kind, make, sizes, aggregate):
    strategy = kind()
    results = []
    for copied in (False, True):
        with strategy.scope():
            variables = [mpistrat.Variable(np.linspace(1, 2, size)) for size in SIZES[sizes]]

        def gradients(variables=variables, copied=copied):
            first, *rest = [component(variable).array for variable in variables]
            given = [first[::-1], *rest]
            return [each.copy() for each in given] if copied else given

        results.append(stepped(strategy, MAKE[make](), variables, gradients, aggregate))
    for mine, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("aggregate", [True, False])
def test_views_of_other_variables_as_dense_gradients_and_rows(aggregate):
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    results = []
    for copied in (False, True):
        with strategy.scope():
            a, b = (mpistrat.Variable(np.linspace(k, k + 1, 12).reshape(4, 3)) for k in (1, 2))

        def gradients(a=a, b=b, copied=copied):
            rows, dense = a.own_copy()[1:3], a.own_copy()
            if copied:
                rows, dense = rows.copy(), dense.copy()
            return [IndexedSlices(rows, np.array([0, 2]), (4, 3)), dense]

        results.append(stepped(strategy, SGD(0.5, weight_decay=0.25), [a, b], gradients, aggregate))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("aggregate", [True, False])
def test_a_variable_is_its_own_gradient(aggregate):
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [mpistrat.Variable(np.ones(size)) for size in SIZES["both"]]
    optimizer = SGD(0.5, weight_decay=0.5)
    found = stepped(strategy, optimizer, variables, lambda: variables, aggregate)
    kept = 0.75 - 0.5 * (strategy.num_replicas_in_sync if aggregate else 1)
    for value in found:
        np.testing.assert_array_equal(value, kept**2)
