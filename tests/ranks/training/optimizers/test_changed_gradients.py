"""A step after a step with other gradients: each is looked at, however many fit before it."""

import numpy as np
import pytest

import mpistrat
from mpistrat.optimizers import SGD

SHAPES = (2, 3), (3, 2), (6,), (1, 6)


@pytest.fixture
def prepared(strategy):
    """An optimizer whose step of some variables is prepared, and these."""
    optimizer = SGD(1.0)
    with strategy.scope():
        variables = [mpistrat.Variable(np.zeros(shape), name=f"v{i}") for i, shape in enumerate(SHAPES)]
    for _ in range(2):
        strategy.run(optimizer.apply_gradients, (zip(map(np.ones, SHAPES), variables, strict=True),))
    return optimizer, variables


@pytest.mark.parametrize("which", range(len(SHAPES)))
def test_other_kinds(strategy, prepared, which):
    optimizer, variables = prepared
    replicas = strategy.num_replicas_in_sync
    expected = [np.full(shape, -2.0 * replicas) for shape in SHAPES]
    for kind in (np.ndarray.tolist, np.float32, lambda array: array.astype(">f8")):
        gradients = [np.ones(shape) for shape in SHAPES]
        gradients[which] = kind(gradients[which])
        pairs = ((gradient, variable) for gradient, variable in zip(gradients, variables, strict=True))
        strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
        expected = [each - replicas for each in expected]
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize("count", range(len(SHAPES)))
def test_fewer(strategy, prepared, count):
    optimizer, variables = prepared
    pairs = list(zip(map(np.ones, SHAPES[:count]), variables[:count], strict=True))
    if count:
        strategy.run(optimizer.apply_gradients, (pairs,))
    else:
        with pytest.raises(ValueError, match="No gradients"):
            strategy.run(optimizer.apply_gradients, (pairs,))
    for i, variable in enumerate(variables):
        np.testing.assert_array_equal(variable.numpy(), -(2 + (i < count)) * strategy.num_replicas_in_sync)


def test_more(strategy, prepared):
    optimizer, variables = prepared
    with strategy.scope():
        one_more = mpistrat.Variable(np.zeros(5))
    pairs = zip(map(np.ones, (*SHAPES, 5)), (*variables, one_more), strict=True)
    strategy.run(lambda: optimizer.apply_gradients(pairs))
    for variable, number in zip((*variables, one_more), [3] * len(SHAPES) + [1], strict=True):
        np.testing.assert_array_equal(variable.numpy(), -number * strategy.num_replicas_in_sync)


def test_errors(strategy, prepared):
    optimizer, variables = prepared
    wrong = {
        "shape": [np.ones(shape) for shape in (SHAPES[1], SHAPES[0], *SHAPES[2:])],
        "its gradient complex128": [*map(np.ones, SHAPES[:3]), np.ones(SHAPES[3], complex)],
        "is longer": [*map(np.ones, SHAPES[:3])],
        "is shorter": [*map(np.ones, SHAPES), np.ones(3)],
    }
    for text, gradients in wrong.items():
        with pytest.raises(ValueError, match=text):
            strategy.run(lambda given=gradients: optimizer.apply_gradients(zip(given, variables, strict=True)))
    with pytest.raises(ValueError, match="unpack"):
        strategy.run(optimizer.apply_gradients, ([(np.ones(SHAPES[0]), variables[0], 0)],))
    masked = [*map(np.ones, SHAPES[:3]), np.ma.ones(SHAPES[3])]
    with pytest.raises(TypeError, match="masked arrays"):
        strategy.run(lambda: optimizer.apply_gradients(zip(masked, variables, strict=True)))
    with pytest.raises(TypeError, match="bool"):
        strategy.run(optimizer.apply_gradients, ([(np.ones(SHAPES[0], bool), variables[0])],))
    assert optimizer.iterations == 2
    for variable in variables:
        np.testing.assert_array_equal(variable.numpy(), -2.0 * strategy.num_replicas_in_sync)


def test_in_a_function_of_map(strategy, prepared):
    optimizer, variables = prepared

    def train(x):
        strategy.run(optimizer.apply_gradients, (zip(map(np.ones, SHAPES), variables, strict=True),))
        return x

    rows = mpistrat.data.Dataset.from_arrays(np.arange(8)).batch(4).map(train)
    batches = iter(strategy.experimental_distribute_dataset(rows))
    with pytest.raises(RuntimeError, match="while a batch was made"):
        next(batches)
    assert optimizer.iterations == 2
