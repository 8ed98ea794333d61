"""An `update` that is set on one optimizer changes variables of all sizes, from its next step on."""

import copy

import numpy as np
import pytest

import mpistrat
from mpistrat.optimizers import SGD, Adam
from mpistrat.values import IndexedSlices


def add_gradient(weights, gradient, step, rate, *state):
    weights += gradient


@pytest.fixture
def variables(strategy):
    with strategy.scope():
        return [mpistrat.Variable(np.zeros(size)) for size in (3, 4, 40_000)]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("make", [SGD, Adam, lambda: SGD(weight_decay=0.5)], ids=["sgd", "adam", "decay"])
def test_variables_of_all_sizes_and_rows(strategy, variables, make, steps_before):
    optimizer = make()

    def step():
        ones = [np.ones(variable.shape) for variable in variables]
        strategy.run(lambda: optimizer.apply_gradients(zip(ones, variables, strict=True)))

    for _ in range(steps_before):
        step()
    for variable in variables:
        variable.assign(np.zeros(variable.shape))
    optimizer.update = add_gradient
    optimizer.learning_rate = 0  # for the decay
    replicas = strategy.num_replicas_in_sync
    for number in (1, 2):
        step()
        for variable in variables:
            np.testing.assert_array_equal(variable.numpy(), number * replicas)
    rows = IndexedSlices(np.ones(1), np.array([1]), (3,))
    strategy.run(lambda: optimizer.apply_gradients([(rows, variables[0])]))
    np.testing.assert_array_equal(variables[0].numpy(), np.array([2, 3, 2]) * replicas)
    assert optimizer.on_gpu(1, 0.5) is None


def test_what_the_program_sets_too_is_kept(strategy, variables):
    optimizer = SGD()
    optimizer.update_rows = lambda weights, rows, step, rate, *state: weights.fill(7)
    optimizer.update = add_gradient
    optimizer.elementwise = True
    rows = IndexedSlices(np.ones(1), np.array([1]), (3,))
    strategy.run(lambda: optimizer.apply_gradients([(rows, variables[0])]))
    np.testing.assert_array_equal(variables[0].numpy(), 7)
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(4), variables[1])]))
    np.testing.assert_array_equal(variables[1].numpy(), 2 * strategy.num_replicas_in_sync)


def test_a_copy_has_it(strategy, variables):
    optimizer = SGD()
    optimizer.update = add_gradient
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), variables[0])]))
    other, v = copy.deepcopy((optimizer, variables[0]))
    strategy.run(lambda: other.apply_gradients([(np.ones(3), v)]))
    np.testing.assert_array_equal(v.numpy(), 2 * strategy.num_replicas_in_sync)
    np.testing.assert_array_equal(variables[0].numpy(), strategy.num_replicas_in_sync)


def test_without_elementwise_variables_are_updated_one_by_one(strategy, variables):
    sizes = []

    class Noting(SGD):
        elementwise = True

        def update(self, weights, gradient, step, rate, *state):
            sizes.append(weights.size)

    optimizer = Noting()
    for elementwise in (True, False):
        optimizer.elementwise = elementwise
        for _ in range(2):
            sizes.clear()
            pairs = zip(map(np.ones, (3, 4)), variables, strict=False)
            strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
        assert sizes == ([7] if elementwise else [3, 4])
